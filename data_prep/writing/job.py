"""The folder of an unfinished conversion, shared by all its processes and restarts.

OUT/.hpctrain-partial/job.json            the plan; every process that continues must have the same
OUT/.hpctrain-partial/pieces/00012/       a finished piece: its shards and piece.json
OUT/.hpctrain-partial/pieces/.00012.…/    a piece that one process is writing
OUT/.hpctrain-partial/looks/00012.npz     what the first of two passes saw of a piece
OUT/.hpctrain-partial/looks/00012.choice.npz    which samples of the piece stay, and their splits
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

from hpctrain.disk import sync, write_atomically
from hpctrain.errors import DataError, StorageError
from hpctrain.shards import commit
from hpctrain.shards.commit import PARTIAL, storage_error
from hpctrain.shards.field import Field
from hpctrain.shards.index import Shard, check_shard

JOB, PIECES, LOOKS, PIECE = "job.json", "pieces", "looks", "piece.json"
WAIT_S = 60.0  # the longest wait for another part that is putting all parts together


@dataclass(frozen=True)
class Plan:
    """A conversion, as far as `finalize` needs to know it; JSON."""

    fingerprint: str  # a digest of the source and of all options that the result depends on
    pieces: int  # the number of pieces
    splits: Sequence[str]  # the names of the splits that are known beforehand, in their order
    fields: Mapping[str, Field]  # the schema
    categories: Mapping[str, Sequence[str]]  # see `Source`
    # The provenance for the index, without what is only known at the end.
    provenance: Mapping[str, Any]
    on_error: str  # what to do with records that cannot be used: "stop", "skip" or "collect"
    parts: int = 0  # the number of parts N of `--part I/N`; 0 without that option
    beside: Mapping[str, str] = field(default_factory=dict)  # see `Source`
    group: str = ""  # the field of which no value is in two splits, or ""

    @property
    def command(self) -> str:
        """Return the command line without `--part`."""
        return str(self.provenance.get("command"))

    def share(self, part: int) -> range:
        """Return the numbers of the pieces of a part; parts count from 1."""
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
    """The result of converting a piece."""

    fingerprint: str  # the fingerprint of the job
    shards: Sequence[Shard]  # the shards; their paths are relative to the piece's folder
    moments: Mapping[str, Mapping[str, Any]]  # `Moments.state` by split and field
    digest: str  # the digest of the samples
    duplicates: int  # the number of samples left out because an earlier sample is equal
    leaks: int  # how many of the duplicates belong to another split than the first equal sample
    problems: Sequence[Problem]  # the records that could not be used
    # The number of records that held nothing, by the reason.
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """What the first of two passes decided about the samples of a piece."""

    keep: NDArray[np.bool_]  # which samples are kept, bool (n,)
    leaks: int  # see `Result`
    names: Sequence[str]  # the names of the splits
    # The number of each sample's split in `names`, (n,); None: the sample's key decides.
    splits: NDArray[np.intp] | None


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

    def note_result(self, folder: Path, result: Result) -> None:
        """Write the result of a piece into the piece's unfinished folder."""
        content = {  # `asdict` would copy the statistics of each field
            **vars(result),
            "shards": [asdict(shard) for shard in result.shards],
            "problems": [asdict(problem) for problem in result.problems],
        }
        (folder / PIECE).write_text(json.dumps(content), encoding="utf-8")

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
        """Return the path of a piece's shard, relative to `folder`."""
        return f"{PIECES}/{number:05d}/{shard}"

    def look_path(self, number: int) -> Path:
        """Return the path of the file with what the first pass saw of a piece."""
        return self.folder / LOOKS / f"{number:05d}.npz"

    def look(self, number: int) -> dict[str, NDArray[Any]]:
        """Return the arrays that `note_look` has written."""
        with np.load(self.look_path(number)) as content:
            return dict(content)

    def note_look(self, number: int, **arrays: Any) -> None:
        """Write down what the first pass saw of a piece."""
        _save(self.look_path(number), arrays)

    def choice_path(self, number: int) -> Path:
        """Return the path of the file with the choice for the samples of a piece."""
        return self.folder / LOOKS / f"{number:05d}.choice.npz"

    def choice(self, number: int) -> Choice:
        """Return the choice that `choose` has written."""
        with np.load(self.choice_path(number)) as content:
            arrays = dict(content)
        names, leaks = arrays["names"].tolist(), int(arrays["leaks"])
        return Choice(arrays["keep"], leaks, names, arrays.get("splits"))

    def choose(self, number: int, choice: Choice) -> None:
        """Write down the choice for the samples of a piece."""
        arrays = {"keep": choice.keep, "leaks": choice.leaks, "names": np.array(choice.names, str)}
        if choice.splits is not None:
            arrays["splits"] = choice.splits
        _save(self.choice_path(number), arrays)

    def _place(self, number: int) -> Path:
        return self.folder / PIECES / f"{number:05d}"


class Job:
    """An unfinished conversion; it is locked against other writers until it is closed."""

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
        """Begin a job, or continue it if it has been begun here."""
        found, self.plan = self._found(), plan
        self.pieces = JobFolder(self.folder, plan.fingerprint)
        try:
            if found is None or found.fingerprint != plan.fingerprint:
                self._make_room(found, overwrite)
            (self.folder / PIECES).mkdir(exist_ok=True)
            (self.folder / LOOKS).mkdir(exist_ok=True)
            fields = {name: field.as_json() for name, field in plan.fields.items()}
            write_atomically(self.folder / JOB, json.dumps({**vars(plan), "fields": fields}))
            if not self._shared:
                self._remove_unfinished()
        except OSError as error:
            raise storage_error(self.out, error) from None

    def _make_room(self, found: Plan | None, overwrite: bool) -> None:
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
        found = self._found()
        if found is None:
            return False
        self.plan, self.pieces = found, JobFolder(self.folder, found.fingerprint)
        return True

    def alone(self) -> bool:
        """Lock the folder against other parts too; if one is at work, unlock and return False."""
        if self._shared and not commit.alone(self.out, self._lock):
            commit.unlock(self._lock)
            self._lock = None
            # Two parts that ask at the same time refuse each other. So each asks again without its
            # own lock, and one of them gets it.
            with suppress(OSError, StorageError):
                self._lock = commit.lock(self.out)
            if self._lock is None:
                return False
            if not (self.folder / JOB).exists():  # another part has put all together meanwhile
                commit.discard(self.out)
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
        """Keep the folder for the other parts and `finalize`, even without a finished piece."""
        self._kept = True

    def close(self) -> None:
        """Unlock the folder; remove unfinished pieces, and the folder if nothing is finished."""
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
    """Write a file of arrays atomically."""
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
