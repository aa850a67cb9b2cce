"""The folder of a conversion that is not finished, shared by all its processes and restarts.

OUT/.hpctrain-partial/job.json            what is being done: who continues must agree
OUT/.hpctrain-partial/pieces/00012/       a finished piece: its shards and piece.json
OUT/.hpctrain-partial/pieces/.00012.…/    one that is being written, by one process
OUT/.hpctrain-partial/looks/00012.npz     what the first of two passes saw of a piece
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from hpctrain.data.commit import PARTIAL, clear_leftovers, lock, storage_error
from hpctrain.data.index import Field, Shard
from hpctrain.disk import temporary, write_atomically
from hpctrain.errors import DataError

JOB, PIECES, LOOKS, PIECE = "job.json", "pieces", "looks", "piece.json"


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
        beside: See `Source`.
    """

    fingerprint: str
    pieces: int
    splits: Sequence[str]
    fields: Mapping[str, Field]
    categories: Mapping[str, Sequence[str]]
    provenance: Mapping[str, Any]
    on_error: str
    beside: Mapping[str, str] = field(default_factory=dict)


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
        shards: Their paths are within the piece's folder.
        moments: By split and field, `Moments.state`.
        digest: Of the samples.
        samples: Kept.
        duplicates: Left out because their content was there before.
        problems: Records that could not be used.
        source_bytes: Of the files that were read.
        skipped: How many records held nothing, by the reason.
    """

    shards: Sequence[Shard]
    moments: Mapping[str, Mapping[str, Any]]
    digest: str
    samples: int
    duplicates: int
    problems: Sequence[Problem]
    source_bytes: int
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class JobFolder:
    """Where pieces are written and found; any process may."""

    folder: Path

    def done(self) -> set[int]:
        """The pieces that are finished."""
        names = os.listdir(self.folder / PIECES)
        return {int(name) for name in names if name.isdigit()}

    def begin(self, number: int) -> Path:
        """Return an empty folder for a piece."""
        folder = temporary(self._place(number))
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        return folder

    def finish(self, number: int, folder: Path, result: Result) -> None:
        """Have the piece in `folder` be there, whole, after a crash too."""
        write_atomically(folder / PIECE, json.dumps(asdict(result)))
        try:
            folder.rename(self._place(number))
        except OSError:
            if not self._place(number).exists():
                raise
            shutil.rmtree(folder)  # the same task ran twice: both did the same

    def result(self, number: int) -> Result:
        """Of a finished piece."""
        content = json.loads((self._place(number) / PIECE).read_bytes())
        content["shards"] = [Shard(**shard) for shard in content["shards"]]
        content["problems"] = [Problem(**problem) for problem in content["problems"]]
        return Result(**content)

    def path(self, number: int, shard: str) -> str:
        """Of a piece's shard, within `folder`."""
        return f"{PIECES}/{number:05d}/{shard}"

    def look(self, number: int) -> Path:
        """Where the first pass notes what it saw of a piece."""
        return self.folder / LOOKS / f"{number:05d}.npz"

    def _place(self, number: int) -> Path:
        return self.folder / PIECES / f"{number:05d}"


class Job:
    """An unfinished conversion, held against other writers while it is open.

    Args:
        out: Made if it does not exist.
        plan: What is to be done; None: what was begun there.
        shared: Beside other parts of the same job; otherwise another job's remains are removed.

    Raises:
        DataError: Another job's remains are there, or (`plan` None) nothing.
        StorageError: The folder cannot be written, or another process is writing there.
    """

    def __init__(self, out: Path, plan: Plan | None, *, shared: bool = False) -> None:
        self.out, self.folder = out, out / PARTIAL
        self.pieces = JobFolder(self.folder)
        try:
            if plan is not None:
                out.mkdir(parents=True, exist_ok=True)
            self._lock = lock(out, shared=shared)
            try:
                self.plan = self._begin(plan, shared)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise storage_error(out, error) from None

    def _begin(self, plan: Plan | None, shared: bool) -> Plan:
        found = self._found()
        if plan is None:
            if found is None:
                raise DataError(f"{self.out} holds no parts to finalize: there is no {PARTIAL}")
            return found
        if found is not None and found.fingerprint != plan.fingerprint:
            if shared:
                raise DataError(
                    f"{self.out} holds parts of another source or of other options: "
                    f"{found.provenance.get('command')}; give the same command for each part, "
                    f"or remove {self.folder}"
                )
            found = None
        if found is None:
            if not shared:
                clear_leftovers(self.out)
            (self.folder / PIECES).mkdir(parents=True, exist_ok=True)
            (self.folder / LOOKS).mkdir(exist_ok=True)
            write_atomically(self.folder / JOB, json.dumps(asdict(plan)))
        self.resumed = found is not None
        if not shared:
            for unfinished in (self.folder / PIECES).glob(".*"):
                shutil.rmtree(unfinished)
        return plan

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

    def close(self) -> None:
        """Let other writers in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
