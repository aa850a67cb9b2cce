"""The run directory, which contains everything about a run.

    runs/digits-3fa92c1b/
        config.yaml    the frozen config, which every rank reads
        run.json       signature, state, submission, attempts, result
        provenance/    commit, changes and package versions (see `hpctrain.runs.code.provenance`)
        modules.json   the user's code (see `hpctrain.runs.code.trained_code`)
        failed         why a rank has failed under Slurm (see `hpctrain.runs.state.failure`)
        progress.json  the last step and its metrics, while the run trains
        stop           a stop request (see `hpctrain.runs.state.stop_request`)
        logs/          output of the ranks under Slurm, one file per rank
        checkpoints/   step-00000200/ …
        secret         with which ranks know each other (`hpctrain.cluster.ranks.run_secret`)
        compile/       the code that torch.compile has made (`engine.job.compile_cache`)
        journal/       params, metrics and tags, for MLflow (see `hpctrain.tracking.journal`)
        artifacts/     images and plots, for MLflow (see `hpctrain.tracking.page.images`)

A queued run has only the first two: clusters limit the number of files, and sweeps have many runs.

The name has the signature, a digest of all config keys and data that decide the result
(`config.identity`). So the same command finds the same directory and continues there, and two
different runs never have the same directory.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.base.errors import DamageError, InUseError, StorageError
from hpctrain.base.files.disk import create, open_regular, set_aside, write_atomically
from hpctrain.base.files.lock import is_locked, open_lock, take
from hpctrain.base.files.record import read
from hpctrain.base.forks import keep_private
from hpctrain.base.names.run_record import AttemptRecord, Progress, RunRecord
from hpctrain.base.names.step_names import step_of
from hpctrain.cluster.ranks import epochs
from hpctrain.config.frozen import digest
from hpctrain.runs.checkpoints.manifest import Manifest, newest_healthy
from hpctrain.tracking import samples
from hpctrain.tracking.journal import journal_path

_LONGEST_HOLDER = 300


class RunDir:
    """The directory of one run.

    The states in run.json are "created" (frozen), "queued" (submitted to Slurm), "running",
    "interrupted" (stopped and saved), "paused" (saved at a step that was asked for), "failed" and
    "finished". A run that was submitted has a
    `submission`: the path of the script, the number of the array task, the user and the time.
    """

    def __init__(self, path: Path, data_digest: str = "") -> None:
        self.path, self.name, self.data_digest = path, path.name, data_digest
        self.config_file, self.checkpoints = path / "config.yaml", path / "checkpoints"
        self.logs, self.provenance = path / "logs", path / "provenance"

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Return an existing run directory; one that is incomplete or damaged is a StorageError."""
        run = cls(Path(os.path.realpath(path)))
        for name in ("run.json", "config.yaml"):
            if not (run.path / name).is_file():
                cure = "; the command that has made the run writes it" if name != "run.json" else ""
                raise StorageError(f"{path}: no run directory ({name} is missing{cure})")
        if not run.read().signature:
            raise DamageError(run.path / "run.json", "it has no `signature`")
        return run

    @property
    def is_new(self) -> bool:
        """Whether no attempt has begun here, and nothing of another run was brought here."""
        brought = self.checkpoints.exists() or journal_path(self.path).exists()
        return not (brought or self.read().attempts)

    def last_checkpoint(self) -> int:
        """Return the global step of the newest healthy checkpoint; 0 without one.

        One that an attempt has found damaged does not count.
        """
        attempts = self.read().attempts
        newest = newest_healthy(self.checkpoints, partial(_was_damaged, attempts))
        return 0 if newest is None else step_of(newest)

    @property
    def code_copy(self) -> Path | None:
        """The copy of the code that the run was submitted with; None without one."""
        digest = self.read().code
        return self.path.parent / "code" / digest if digest else None

    def freeze(self, text: str, sync: bool = True, **facts: Any) -> None:
        """Write the directory with config.yaml, which is `text`, and run.json; or update them.

        More facts go into run.json. If you freeze many runs, call `disk.sync_file_system` once, and
        not `sync` for each.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            new = {
                "version": RunRecord.VERSION,
                "uid": uuid.uuid4().hex,  # identifies the run in MLflow
                "signature": self.name.rpartition("-")[2],
                "data_digest": self.data_digest,
                "state": "created",
                "attempts": [],
                "config_digests": [digest(text.encode())],
            }
            if not (self.path / "run.json").exists():
                write_atomically(self.config_file, text, sync)
                # Without a file for the lock: clusters limit the number of files.
                if create(self.path / "run.json", _text(new | facts), sync):
                    return
            self._freeze_again(text, new, facts, sync)
        except OSError as error:
            raise StorageError(
                f"output_dir={self.path.parent}: cannot write {error.filename or self.path} "
                f"({error.strerror})"
            ) from error

    def _freeze_again(
        self, text: str, new: dict[str, Any], facts: dict[str, Any], sync: bool
    ) -> None:
        with self._change(sync) as content:
            # Both digests are known before the file changes, which a job may read just now.
            files = [self.config_file] if self.config_file.exists() else []
            known = content.get("config_digests") or [digest(f.read_bytes()) for f in files]
            content |= (new if not content else {}) | facts
            content["config_digests"] = list(dict.fromkeys([*known, *new["config_digests"]]))
        # To replace a file takes ext4 milliseconds, and a sweep given again has the same ones.
        if not files or files[0].read_bytes() != text.encode():
            write_atomically(self.config_file, text, sync)

    def archive(self) -> Path:
        """Rename the directory to `NAME.1`, or the next free number; return the new path."""
        return set_aside(self.path)

    def read(self) -> RunRecord:
        """Return the content of run.json; one without a state if the file does not exist.

        A file that is damaged or cannot be read is a DamageError.
        """
        return RunRecord.of(self.path)

    def update(self, **values: Any) -> None:
        """Change some values of run.json."""
        with self._change() as content:
            content |= values

    def begin_attempt(self, **facts: Any) -> None:
        """Record the start of an attempt; `facts` are its host, job, world size and so on."""
        for folder in (self.logs, self.checkpoints):
            folder.mkdir(exist_ok=True)
        with self._change() as content:
            for before in content["attempts"][-1:]:
                if "ended" not in before:  # it was killed
                    before["seen"] = max(before["started"], self.last_sign())
            # What is of the attempt before: the metrics of a pause, and the end of its memory.
            content |= {"state": "running", "result": None, "lowered_in": None}
            content["attempts"].append({"started": time.time(), **facts})

    def add_facts(self, **facts: Any) -> None:
        """Record facts about the last attempt."""
        with self._change() as content:
            content["attempts"][-1] |= facts

    def last_sign(self, progress: Progress | None = None) -> float:
        """Return when the last attempt was known to be alive, in seconds since the epoch; or 0.

        Give the `progress` if it was read already.
        """
        with suppress(DamageError):
            progress = progress or Progress.of(self.path)
        return max(progress.time if progress else 0.0, samples.last_time(self.path))

    def end_attempt(self, state: str, **facts: Any) -> None:
        """Record the state of the run at the end of its last attempt, with facts.

        These belong to the attempt, except `result`, which belongs to the run.
        """
        with self._change() as content:
            content["state"] = state
            content["result"] = facts.pop("result", content.get("result"))
            # No record has NUL in a text, which an error of a library may have.
            facts = {k: v.replace("\0", "") if isinstance(v, str) else v for k, v in facts.items()}
            content["attempts"][-1] |= {"ended": time.time(), "state": state, **facts}

    @contextmanager
    def _change(self, sync: bool = True) -> Iterator[dict[str, Any]]:
        """Yield run.json's content for changes, and write it back, under a lock.

        The lock is needed because a job may start while its submission is being written.
        """
        with open(self.path / ".run.json.lock", "a", opener=open_lock) as file:
            take(file.fileno(), self.path / "run.json", partial(time.sleep, 0.01))
            self.read()  # a damaged file stays as it is
            content: dict[str, Any] = {}
            with suppress(FileNotFoundError):  # what it has of a newer version stays
                content = read(dict[str, Any], self.path / "run.json")
            yield content
            write_atomically(self.path / "run.json", _text(content), sync)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the run, or raise InUseError; the end of the process releases it."""
        with open(self.path / "lock", "a+", opener=open_lock) as file:
            take(file.fileno(), self.path / "lock", self._refuse)
            keep_private(file.fileno())
            file.truncate(0)
            file.write(holder := f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            with epochs.holding(self.path, holder):
                yield

    def check_unlocked(self) -> None:
        """Raise InUseError if a process holds the lock of the run, as far as this host can see."""
        if self.is_locked():
            self._refuse()

    def _refuse(self) -> None:
        lock = self.path / "lock"
        with open_regular(lock) as file:
            holder = file.read(_LONGEST_HOLDER).decode(errors="replace").strip()
        holder = holder or "another process"
        raise InUseError(f"{self.path} is in use by {holder}: wait for it, or stop it")

    def is_locked(self) -> bool:
        """Return whether a process holds the lock of the run, as far as this host can see."""
        return is_locked(self.path / "lock")


@contextmanager
def told(run: Path) -> Iterator[None]:
    """Raise a StorageError for an error of the context that is due to the storage of the run.

    Its directory is gone, or the disk is full. Whatever writes first meets that, and what records
    the failure meets it again.
    """
    try:
        yield
    except Exception as error:
        if problem := _problem(run, error):
            raise StorageError(problem) from error
        raise


def _problem(run: Path, error: Exception) -> str:
    """Return what has happened; "" if the error has nothing to do with the storage of the run."""
    if not (run / "config.yaml").exists():
        return (
            f"{run} is gone: it was deleted or renamed while the run was under way, so nothing "
            "more of it can be saved. Bring it back, and the same command goes on from its last "
            "checkpoint; without it the run starts at step 0"
        )
    if not isinstance(error, OSError):
        return ""
    file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        facts = os.statvfs(run)
        return (
            f"{file or run}: cannot be written ({error.strerror}; the file system of the run has "
            f"{facts.f_bavail * facts.f_frsize:,} bytes free). `python -m hpctrain gc` lists what "
            "can be deleted; then the same command goes on from the last checkpoint"
        )
    if file is not None and file.is_relative_to(run):
        return f"{file}: cannot be read or written ({error.strerror})"
    return ""


def _was_damaged(attempts: Sequence[AttemptRecord], checkpoint: Path) -> bool:
    """Return whether the attempts have found a checkpoint damaged, and not saved it again."""
    step = step_of(checkpoint)
    for one in reversed(attempts):
        if step in one.damaged:
            with suppress(StorageError):
                return Manifest.read(checkpoint).time < one.started
            return True
        if one.first_step == step:
            break  # somebody has brought it back
    return False


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
