"""The folder of an unfinished conversion, shared by all its processes and restarts.

OUT/.hpctrain-partial/job.json            the plan; every process that continues must have the same
OUT/.hpctrain-partial/pieces/00012/       a finished piece: its shards and piece.json
OUT/.hpctrain-partial/pieces/.00012.…/    a piece that one process is writing
OUT/.hpctrain-partial/looks/00012.npz     what the first of two passes saw of a piece
OUT/.hpctrain-partial/choice.npy          the splits of all samples, which follow from that
"""

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from data_prep.writing import commit
from data_prep.writing.commit import PARTIAL, writable
from data_prep.writing.records import ConversionPlan, Result, as_json, load
from hpctrain.base.errors import DataError, StorageError
from hpctrain.base.files.disk import open_regular, sync, write_atomically
from hpctrain.data.shards.index import check_shard
from hpctrain.data.shards.types import Array

JOB, PIECES, LOOKS, PIECE = "job.json", "pieces", "looks", "piece.json"
CHOICE = "choice.npy"
WAIT_S = 60.0  # the longest wait for another part that is putting all parts together
_THEN = "remove it, and give the command again"


@dataclass(frozen=True)
class JobFolder:
    """The folder where any process writes pieces and finds them."""

    folder: Path
    fingerprint: str

    def done(self) -> set[int]:
        """Return the numbers of the finished pieces."""
        try:
            names = os.listdir(self.folder / PIECES)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {int(name) for name in names if name.isdigit()}

    def begin(self, number: int) -> Path:
        """Return an empty folder for a piece."""
        folder = self._place(number).with_name(f".{number:05d}.{uuid.uuid4().hex}")
        folder.mkdir()
        return folder

    def finish(self, number: int, folder: Path) -> None:
        """Give the piece in `folder` its name once all its files are on the disk."""
        for path in (*folder.iterdir(), folder):
            sync(path)
        try:
            folder.rename(self._place(number))
        except OSError:
            if not self._place(number).exists():
                raise
            shutil.rmtree(folder)  # the same task ran twice, with the same result

    def result(self, number: int) -> Result:
        """Return the result of a finished piece."""
        place = self._place(number)
        try:
            result = load(Result, place / PIECE, 4)
            for shard in result.shards:
                check_shard(place / shard.path, shard)
        except (OSError, DataError) as error:
            raise DataError(f"{place} is damaged ({error}): {_THEN}") from None
        if result.fingerprint != self.fingerprint:
            raise DataError(
                f"{place} is of another source or of other options than the rest, two commands "
                f"wrote here at once: {_THEN}"
            )
        return result

    def path(self, number: int, shard: str) -> str:
        """Return the path of a piece's shard, relative to `folder`."""
        return f"{PIECES}/{number:05d}/{shard}"

    def seen(self) -> set[int]:
        """Return the pieces that the first pass has seen."""
        names = [path.name.partition(".") for path in (self.folder / LOOKS).iterdir()]
        return {int(number) for number, _, kind in names if number and kind == "npz"}

    def look(self, number: int) -> dict[str, Any]:
        """Return what the first pass has noted of a piece."""
        path = self._seen(number)
        try:
            with open_regular(path, 3) as file, np.load(file) as content:
                return dict(content)
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise DataError(f"{path} is damaged ({error}): {_THEN}") from None

    def note(self, number: int, arrays: Mapping[str, Any]) -> None:
        """Write down what the first pass has seen of a piece, atomically."""
        path = self._seen(number)
        unfinished = path.with_name(f".{path.name}")
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def choose(self, splits: NDArray[np.intp]) -> None:
        """Write down the number of the split of each sample of all pieces."""
        with writable(self.folder):
            (self.folder / CHOICE).unlink(missing_ok=True)  # which could be a link
            np.save(self.folder / CHOICE, splits)

    def chosen(self, start: int, count: int) -> Array:
        """Return the numbers of the splits of so many samples."""
        splits: Array = np.load(self.folder / CHOICE, mmap_mode="r")
        return splits[start : start + count]

    def _seen(self, number: int) -> Path:
        return self.folder / LOOKS / f"{number:05d}.npz"

    def _place(self, number: int) -> Path:
        return self.folder / PIECES / f"{number:05d}"


def begun(out: Path) -> ConversionPlan | None:
    """Return the plan of the conversion that was begun in `out`, or None."""
    try:
        return load(ConversionPlan, out / PARTIAL / JOB, 2)
    except FileNotFoundError:
        return None
    except DataError as error:
        raise DataError(f"{error}; remove {out / PARTIAL} to begin anew") from None


class Conversion:
    """An unfinished conversion; it is locked against other writers until it is closed."""

    plan: ConversionPlan
    pieces: JobFolder

    def __init__(self, out: Path, *, shared: bool = False) -> None:
        self.out, self.folder, self._shared = out, out / PARTIAL, shared
        self._kept = False
        with writable(out):
            self._lock = commit.lock(out, shared=shared, wait=WAIT_S if shared else 0)

    def begin(self, plan: ConversionPlan, *, overwrite: bool = False) -> None:
        """Begin a job, or continue it if it has been begun here."""
        try:
            found = begun(self.out)
        except DataError:
            if self._shared or not overwrite:
                raise
            found = None
        self.plan, self.pieces = plan, JobFolder(self.folder, plan.fingerprint)
        with writable(self.out):
            if found is None or found.fingerprint != plan.fingerprint:
                self._make_room(found, overwrite)
            (self.folder / PIECES).mkdir(exist_ok=True)
            (self.folder / LOOKS).mkdir(exist_ok=True)
            write_atomically(self.folder / JOB, as_json(plan))
            if not self._shared:
                self._remove_unfinished()

    def _make_room(self, found: ConversionPlan | None, overwrite: bool) -> None:
        """Remove the pieces of another job, if that is allowed."""
        if self._shared and found is not None:
            raise DataError(
                f"{self.out} holds parts of another source or of other options: {found.command}; "
                f"give the same command for each part, or remove {self.folder}"
            )
        done = len(self.pieces.done())
        if done and not overwrite:
            what = f": {found.command}" if found is not None else ""
            raise DataError(
                f"{self.out} holds {done} finished pieces of an interrupted command, of another "
                f"source or with other options{what}; --overwrite removes them"
            )
        if not self._shared:
            commit.clear_leftovers(self.out)

    def load(self) -> bool:
        """Load the job that was begun here; return whether there is one."""
        found = begun(self.out)
        if found is not None:
            self.plan, self.pieces = found, JobFolder(self.folder, found.fingerprint)
        return found is not None

    def alone(self) -> bool:
        """Lock the folder against other parts too; if one is at work, unlock and return False."""
        if self._shared and not commit.alone(self.out, self._lock):
            self._unlock()
            # Two parts that ask at the same time refuse each other. So each asks again without its
            # own lock, and one of them gets it.
            with suppress(OSError, StorageError):
                self._lock = commit.lock(self.out)
            if self._lock is None:
                return False
            if not (self.folder / JOB).exists():  # another part has put all together meanwhile
                commit.discard(self.out)
                self._unlock()
                return False
        self._shared = False
        return True

    def _remove_unfinished(self) -> None:
        for unfinished in (self.folder / PIECES).glob(".*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def keep(self) -> None:
        """Keep the folder for the other parts and `finalize`, even without a finished piece."""
        self._kept = True

    def _unlock(self) -> None:
        commit.unlock(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the folder; remove unfinished pieces, and the folder if nothing is finished."""
        with suppress(OSError):
            if not self._kept and commit.alone(self.out, self._lock):
                self._remove_unfinished()
                if all(path.name.startswith(".") for path in self.folder.glob("*/*")):
                    commit.discard(self.out)
        self._unlock()
