"""The saves of a run: one at a time is under way, and rank 0 commits it with a rename.

    step 200       all ranks: plan, and copy the state to the memory of their writers
    steps 201...   the reduction of each step: how many ranks still write? has one failed?
    step 217       none writes: rank 0 writes the manifest and renames the folder
    step 218       all ranks know that the checkpoint of step 200 is committed

A save without writers does all this at once. What cannot be written is said, and each rank writes
its part once more, by itself and from the same copy; if that fails as well, it is a StorageError.
"""

import logging
import pickle
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from hpctrain.base.errors import StorageError
from hpctrain.base.files.disk import sync
from hpctrain.base.processes import marks
from hpctrain.base.terminal.terminal import few
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.engine.checkpoint.metadata_file import METADATA
from hpctrain.engine.checkpoint.saving import part
from hpctrain.engine.checkpoint.saving.committed import Committed
from hpctrain.engine.checkpoint.saving.part import Planned, RankPart, reason
from hpctrain.engine.checkpoint.saving.writer import Writer
from hpctrain.engine.distributed import objects
from hpctrain.engine.parallel.reducing.scalars import Copied, Numbers
from hpctrain.runs.checkpoints.manifest import Manifest

log = logging.getLogger(__name__)
_RESCUE_S, _RESCUE_PAUSE_S = 30.0, 0.2  # at most for the parts of other ranks, after an error
_LEAST_RESCUE_S = 2.0
_LEAST_RATE = 20e6  # bytes/s: after an error nobody waits for a slower disk, which may hang
_LONGEST_S, _SLOWEST = 600.0, 1e6  # else for what a writer has, before its rank writes that itself
_LOOK_S = 0.005
_SHOWN = 3  # ranks that have failed


@dataclass
class Save:
    """A save that is under way, or was committed.

    `manifest` lacks the files, and `best` is the step of the best checkpoint, which stays.
    """

    manifest: Manifest
    best: int
    planned: Planned
    job: RankPart
    again: Callable[[], str]  # writes this rank's part, and returns why it has failed
    error: str | None = None  # why this rank has failed, "" if not; None while its writer writes
    complete: Future[None] | None = None  # on rank 0: makes all of it but its name
    committed: bool = False
    uncommitted: str = ""  # why rank 0 could not commit it
    began: float = field(default_factory=time.monotonic)


class Saves:
    """The saves of a run, which end in `folder`.

    Attributes:
        background: Whether the ranks tell each other in each step how the save under way stands;
            all have set it before the same step.
        committed: The saves that were committed, until somebody takes them.
        under_way: The save that has begun and is not committed, if there is one on all ranks.
        writer: The writer of this rank; without one its part is written while it waits.
    """

    def __init__(self, folder: Committed, ranks: RankInfo) -> None:
        self._committed, self.folder, self._ranks = folder, folder.folder, ranks
        self.background, self._totals = False, Copied()
        self._thread = ThreadPoolExecutor(1)
        self._plan: SavePlan | None = None  # of this rank at the last save, as it was proposed
        self._planned = Planned(self.folder)  # of that save, as the ranks have agreed
        self._told_of: Save | None = None
        self.committed: list[Manifest] = []
        self.under_way: Save | None = None
        self.writer: Writer | None = None

    def start_writers(self, limit: float) -> None:
        """Write in the background from now on; all ranks call this. Copies take `limit` bytes."""
        self.background = True
        try:
            self.writer = Writer(limit, self.folder.parent)
            self._committed.in_background = True
        except OSError as error:
            log.warning("no process can be started (%s), so saves stop the training", error)

    def begin(
        self,
        about: Manifest,
        state: dict[str, Any],
        planner: DefaultSavePlanner,
        best: int,
        *,
        stage: bool,
    ) -> None:
        """Write a state, or with `stage` copy it for the writers, if there are any.

        All ranks call this together, and no other save is under way. `about` lacks the files.
        Without a writer the state must not change before `finish`.
        """
        temporary = self._unfinished(about.step)
        self._committed.end_removing()
        if self.writer is not None:
            self.writer.revive()
        if self._ranks.is_main:
            shutil.rmtree(temporary, ignore_errors=True)  # left by an interrupted save
        run = self.folder.parent
        if not run.exists():  # torch would make it anew, and nobody would find the checkpoint
            raise StorageError(f"{run} is gone, so no checkpoint can be written")
        self._end_if_over()
        planner.set_up_planner(state, is_coordinator=self._ranks.is_main)
        plan = planner.create_local_plan()
        # The folder of an interrupted save is removed before any rank goes on from here.
        known = objects.all_gather([secrets.token_hex(8), plan == self._plan])
        try:
            if all(is_same for _, is_same in known):
                self._planned.reset(temporary)
                with suppress(OSError):  # else the job says why
                    temporary.mkdir(parents=True, exist_ok=True)
            else:
                planned = Planned(temporary)
                dcp.save(state, storage_writer=planned, planner=planner)
                self._plan, self._planned = plan, planned
        except (OSError, dcp.api.CheckpointException) as error:
            raise self._unwritten(about.step, reason(error, temporary)) from error
        job = RankPart(temporary, self._ranks.rank, known[0][0], self._planned.plan, planner)
        save = Save(about, best, self._planned, job, job.write)
        if stage and self.writer is not None and (again := self.writer.stage(job)):
            save.again = again
        else:
            save.error = job.write()
            if stage and save.error:  # the next step changes the state, so it is now or never
                log.warning("%s; it is written once more", self._unwritten(about.step, save.error))
                save.error = job.write()
            if stage:
                save.again = lambda: save.error or ""
        self.under_way = save

    def flags(self) -> list[float]:
        """Return this rank's part of the reduction: writes, has failed, has to commit."""
        save = self._told_of = self.under_way
        if not self.background:
            return []
        if save is None:
            return [0.0] * 3
        error, waits = self._error(save), self._ranks.is_main and not save.committed
        return [float(error is None), float(bool(error or save.uncommitted)), float(waits)]

    def offer(self, totals: Numbers) -> None:
        """Store the reduced flags without waiting for the device."""
        if self.background:
            self._totals.offer(totals, self._told_of)

    def advance(self, spent: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Go on with the save under way as far as the ranks have agreed; all call it each step.

        What takes time is done in the context `spent`.
        """
        for (writing, failed, uncommitted), about in self._totals.take(late=True):
            if (save := self.under_way) is None or about is not save or (writing and not failed):
                continue
            if uncommitted and not failed and not self._is_complete(save):
                continue
            with spent():
                if failed:
                    self.finish()
                elif not uncommitted:
                    self._end(save)
                elif not save.committed:
                    save.uncommitted = self._commit(save)

    def finish(self) -> None:
        """Wait until the save under way is committed, if there is one; all ranks call it together.

        It is a StorageError if it could not be written, nor once more.
        """
        save = self.under_way
        if save is None:
            return
        for again in (False, True):
            error = self._wait(save, _LONGEST_S, _SLOWEST)
            if not (reasons := self._gathered(error)):
                reasons = self._gathered(self._commit(save))
            if not reasons:
                self._end(save)
                return
            failed = self._unwritten(save.manifest.step, reasons)
            if self._ranks.is_main and not again:
                log.warning("%s; it is written once more", failed)
            if error and not again:
                if self.writer is not None and self.writer.error is None:
                    self.writer.process.kill()  # it hangs, and two must not write the files
                save.error = save.again()
                if self.writer is not None:
                    self.writer.revive()
        self.under_way = None
        raise failed

    def rescue(self) -> None:
        """Commit the save under way after an error; the other ranks may be gone."""
        save, self.under_way = self.under_way, None
        if save is None or save.committed:
            return
        error = self._wait(save, _RESCUE_S, _LEAST_RATE)
        # The other parts were begun with this one, so they are soon there, or their ranks are dead.
        took_s = time.monotonic() - save.began
        until = time.monotonic() + min(_RESCUE_S, max(_LEAST_RESCUE_S, took_s))
        while not error and (why := self._commit(save)):
            if time.monotonic() > until:
                error = why
            time.sleep(_RESCUE_PAUSE_S)
        if error:
            log.warning("%s", self._unwritten(save.manifest.step, error))

    def close(self) -> None:
        """End the writer, and what is removed."""
        self._committed.end_removing()
        if self.writer is not None:
            self.writer.close()

    def _error(self, save: Save) -> str | None:
        if save.error is None and self.writer is not None:
            save.error = self.writer.error
        return save.error

    def _wait(self, save: Save, limit_s: float, rate: float) -> str:
        limit_s += 0 if self.writer is None else self.writer.nbytes / rate
        until = time.monotonic() + limit_s
        while (error := self._error(save)) is None:
            if time.monotonic() > until:
                return f"it is not on the disk after {limit_s:.0f} s"
            time.sleep(_LOOK_S)
        return error

    def _gathered(self, error: str) -> str:
        """Return the errors of all ranks as one text; "" without any."""
        found = objects.all_gather(error)
        if len(found) == 1:
            return error
        return few([f"rank {rank}: {text}" for rank, text in enumerate(found) if text], _SHOWN)

    def _unwritten(self, step: int, why: str) -> StorageError:
        return StorageError(f"{self._unfinished(step)}: the checkpoint was not written ({why})")

    def _unfinished(self, step: int) -> Path:
        return self._committed.path(step).with_suffix(".tmp")

    def _end_if_over(self) -> None:
        epochs.end_if_over(self.folder.parent, self._ranks.attempt_key)

    def _end(self, save: Save) -> None:
        self.under_way = None
        self.committed.append(save.manifest)
        # A save that stops the training takes as long as one in the background, not as its copy.
        marks.took(marks.SAVE, time.monotonic() - save.began)

    def _is_complete(self, save: Save) -> bool:
        """Let a thread of rank 0 put a save together; return whether that has ended."""
        if not self._ranks.is_main:
            return True
        if save.complete is None:
            self._end_if_over()
            save.complete = self._thread.submit(self._put_together, save)
            return False
        return save.complete.done()

    def _commit(self, save: Save) -> str:
        """Let rank 0 commit a save whose parts are written; return why it has failed, or ""."""
        if save.committed or not self._ranks.is_main:
            return ""
        self._end_if_over()
        complete = save.complete or self._thread.submit(self._put_together, save)
        try:
            save.complete = None  # it is made once more if it has failed
            complete.result()
            save.complete = complete
            self._end_if_over()  # all of this may have stood still for long
            self._committed.take(save.job.folder)
            self._end_if_over()
            self._committed.remove_old(save.best)
        except (OSError, StorageError, pickle.UnpicklingError, EOFError) as error:
            return reason(error, save.job.folder)
        save.committed = True
        return ""

    def _put_together(self, save: Save) -> None:
        """Write `.metadata` and the manifest from the parts of all ranks, to the disk."""
        folder, ranks = save.job.folder, range(self._ranks.world_size)
        parts = [part.read_part(folder, rank, save.job.token) for rank in ranks]
        save.planned.write_metadata(parts)
        files = {name: each for own in parts for name, each in own["files"].items()}
        files[METADATA] = part.facts(folder / METADATA)
        replace(save.manifest, files=files).write(folder)
        for rank in ranks:
            part.part_path(folder, rank).unlink()
        sync(folder)
