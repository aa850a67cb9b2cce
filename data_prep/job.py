"""The folder of a conversion that is not finished, shared by all its processes and restarts.

OUT/.hpctrain-partial/job.json            what is being done: who continues must agree
OUT/.hpctrain-partial/pieces/00012/       a finished piece: its shards and piece.json
OUT/.hpctrain-partial/pieces/.00012.…/    one that is being written, by one process
OUT/.hpctrain-partial/looks/00012.npz     what the first of two passes saw of a piece
OUT/.hpctrain-partial/looks/00012.choice.npz    what follows from all of them for its samples
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import commit
from hpctrain.data.commit import PARTIAL, storage_error
from hpctrain.data.field import Field
from hpctrain.data.index import Shard, check_shard
from hpctrain.disk import write_atomically
from hpctrain.errors import DataError

JOB, PIECES, LOOKS, PIECE = "job.json", "pieces", "looks", "piece.json"
WAIT_S = 60.0  # for another part that puts all together


@dataclass(frozen=True)
class Plan:
    """What is being done, as far as `finalize` has to know; JSON.

    Attributes:
        fingerprint: Names the source and all options that the result depends on.
        pieces: How many there are.
        splits: The names known beforehand, in their order.
        fields: The schema.
        categories: See `Source`.
        provenance: For the index, less what is only known at the end.
        on_error: What becomes of records that cannot be used.
        parts: Of how many parts the command was one; 0: it does all.
        beside: See `Source`.
    """

    fingerprint: str
    pieces: int
    splits: Sequence[str]
    fields: Mapping[str, Field]
    categories: Mapping[str, Sequence[str]]
    provenance: Mapping[str, Any]
    on_error: str
    parts: int = 0
    beside: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command line, without `--part`."""
        return str(self.provenance.get("command"))

    def share(self, part: int) -> range:
        """The pieces of a part, from 1."""
        parts = max(1, self.parts)
        return range(self.pieces * (part - 1) // parts, self.pieces * part // parts)


@dataclass(frozen=True)
class Problem:
    """A record that cannot be used."""

    file: str
    record: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.record, self.reason) if part)


@dataclass(frozen=True)
class Result:
    """What became of a piece.

    Attributes:
        fingerprint: Of the job.
        shards: Their paths are within the piece's folder.
        moments: By split and field, `Moments.state`.
        digest: Of the samples.
        duplicates: Samples left out because their content was there before.
        leaks: Of those, how many would have gone to another split than the first.
        problems: Records that could not be used.
        skipped: How many records held nothing, by the reason.
    """

    fingerprint: str
    shards: Sequence[Shard]
    moments: Mapping[str, Mapping[str, Any]]
    digest: str
    duplicates: int
    leaks: int
    problems: Sequence[Problem]
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """What the first of two passes decided of a piece's samples.

    Attributes:
        keep: bool (n,).
        leaks: See `Result`.
        names: Of the splits.
        splits: For each sample the place of its split in `names`, (n,); None: its own matter.
    """

    keep: NDArray[np.bool_]
    leaks: int
    names: Sequence[str]
    splits: NDArray[np.intp] | None


@dataclass(frozen=True)
class JobFolder:
    """Where pieces are written and found; any process may."""

    folder: Path
    fingerprint: str

    def done(self) -> set[int]:
        """The pieces that are finished."""
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

    def finish(self, number: int, folder: Path, result: Result) -> None:
        """Have the piece in `folder` be there, whole, after a crash too."""
        write_atomically(folder / PIECE, json.dumps(asdict(result)))
        commit.sync(folder)
        try:
            folder.rename(self._place(number))
        except OSError:
            if not self._place(number).exists():
                raise
            shutil.rmtree(folder)  # the same task ran twice: both did the same

    def result(self, number: int) -> Result:
        """Of a finished piece.

        Raises:
            DataError: It is another job's, or damaged.
        """
        place, then = self._place(number), "remove it, and give the command again"
        try:
            content = json.loads((place / PIECE).read_bytes())
            content["shards"] = [Shard(**shard) for shard in content["shards"]]
            content["problems"] = [Problem(**problem) for problem in content["problems"]]
            result = Result(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{place} is damaged ({error}): {then}") from None
        if result.fingerprint != self.fingerprint:
            raise DataError(
                f"{place} is of another source or of other options than the rest, two commands "
                f"wrote here at once: {then}"
            )
        for shard in result.shards:
            try:
                check_shard(place / shard.path, shard)
            except DataError as error:
                raise DataError(f"{place} is damaged ({error}): {then}") from None
        return result

    def path(self, number: int, shard: str) -> str:
        """Of a piece's shard, within `folder`."""
        return f"{PIECES}/{number:05d}/{shard}"

    def look_path(self, number: int) -> Path:
        """Where the first pass notes what it saw of a piece."""
        return self.folder / LOOKS / f"{number:05d}.npz"

    def look(self, number: int) -> dict[str, NDArray[Any]]:
        """What `note_look` was given."""
        with np.load(self.look_path(number)) as content:
            return dict(content)

    def note_look(self, number: int, **arrays: Any) -> None:
        """Note what the first pass saw."""
        _save(self.look_path(number), arrays)

    def choice_path(self, number: int) -> Path:
        """Where it is noted what becomes of a piece's samples."""
        return self.folder / LOOKS / f"{number:05d}.choice.npz"

    def choice(self, number: int) -> Choice:
        """What `choose` was given."""
        with np.load(self.choice_path(number)) as content:
            arrays = dict(content)
        names, leaks = arrays["names"].tolist(), int(arrays["leaks"])
        return Choice(arrays["keep"], leaks, names, arrays.get("splits"))

    def choose(self, number: int, choice: Choice) -> None:
        """Note what becomes of a piece's samples."""
        arrays = {"keep": choice.keep, "leaks": choice.leaks, "names": np.array(choice.names, str)}
        if choice.splits is not None:
            arrays["splits"] = choice.splits
        _save(self.choice_path(number), arrays)

    def _place(self, number: int) -> Path:
        return self.folder / PIECES / f"{number:05d}"


class Job:
    """An unfinished conversion, held against other writers while it is open.

    Args:
        out: Exists.
        shared: Beside other parts of the same job.

    Raises:
        StorageError: The folder cannot be written, or another process is writing there.
    """

    plan: Plan
    pieces: JobFolder

    def __init__(self, out: Path, *, shared: bool = False) -> None:
        self.out, self.folder, self._shared = out, out / PARTIAL, shared
        self._kept = False
        try:
            self._lock = commit.lock(out, shared=shared, wait=WAIT_S if shared else 0)
        except OSError as error:
            raise storage_error(out, error) from None

    def begin(self, plan: Plan, *, overwrite: bool = False) -> None:
        """Go on with what was begun here, or begin.

        Args:
            plan: What is to be done.
            overwrite: Another job's finished pieces may be removed.

        Raises:
            DataError: Another job's are there.
            StorageError: The folder cannot be written.
        """
        found, self.plan = self._found(), plan
        self.pieces = JobFolder(self.folder, plan.fingerprint)
        try:
            if found is None or found.fingerprint != plan.fingerprint:
                self._make_room(found, overwrite)
            (self.folder / PIECES).mkdir(exist_ok=True)
            (self.folder / LOOKS).mkdir(exist_ok=True)
            write_atomically(self.folder / JOB, json.dumps(asdict(plan)))
            if not self._shared:
                self._remove_unfinished()
        except OSError as error:
            raise storage_error(self.out, error) from None

    def _make_room(self, found: Plan | None, overwrite: bool) -> None:
        """Remove what another job has left, if it may be."""
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
        """Take up what was begun here; return whether there is anything."""
        found = self._found()
        if found is None:
            return False
        self.plan, self.pieces = found, JobFolder(self.folder, found.fingerprint)
        return True

    def alone(self) -> bool:
        """Hold it against other parts too, if there are none at work; otherwise let go of it."""
        if self._shared and not commit.alone(self.out, self._lock):
            commit.unlock(self._lock)
            self._lock = None
            return False
        self._shared = False
        return True

    def _found(self) -> Plan | None:
        try:
            content = json.loads((self.folder / JOB).read_bytes())
            fields = {
                name: Field(f["dtype"], tuple(f["shape"]), f["variable"])
                for name, f in content.pop("fields").items()
            }
            return Plan(fields=fields, **content)
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None

    def _remove_unfinished(self) -> None:
        for unfinished in (self.folder / PIECES).glob(".*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def keep(self) -> None:
        """Leave it there for the other parts and for `finalize`, even without a finished piece."""
        self._kept = True

    def close(self) -> None:
        """Let other writers in; nothing stays behind but what is finished."""
        with suppress(OSError):
            if not self._kept and commit.alone(self.out, self._lock):
                self._remove_unfinished()
                if all(path.name.startswith(".") for path in self.folder.glob("*/*")):
                    commit.discard(self.out)
        commit.unlock(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _save(path: Path, arrays: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
