"""Finds open shards whose file was changed, before what was read from them is used.

    read ── has each file still the stamp that it had when it was opened? ── yes: use the values
                └── no ── has it the digest that the index lists? ── yes: read again
                                                                  └── no: DataError

`hpctrain.data.shards.storage.stamp` says what a stamp is and what it guarantees. A digest reads the
whole file, but `touch`, `chmod` and hard links do not end a run.
"""

import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hpctrain.data.places.verification import check_digest
from hpctrain.data.shards.index import FILE, Shard, check_shard
from hpctrain.data.shards.storage.file import patiently
from hpctrain.data.shards.storage.stamp import FACTS, Stamp, clock
from hpctrain.data.shards.types import Int64s
from hpctrain.errors import DataError

log = logging.getLogger(__name__)


class _Noted(NamedTuple):
    path: str
    stamp: Stamp
    own: bool  # a file of the data set, not a staged copy


class ShardWatch:
    """The stamps of the shards that a process has opened, by their numbers in `shards`.

    A file that was written after `since_ns`, when the run began to read the data set, is compared
    with its digest when it is first opened; with `first_use`, each file is.
    """

    def __init__(self, shards: Sequence[Shard], since_ns: int, first_use: bool) -> None:
        self._shards, self._since_ns, self._first_use = shards, since_ns, first_use
        self._noted: dict[int, _Noted] = {}
        self._locks: dict[int, threading.Lock] = {}

    def admit(self, shard: int, path: Path) -> Stamp:
        """Note and return the stamp of a shard that is about to be opened, if it is unchanged."""
        # A staged copy was compared with the digest when it was made. Its ctime changes whenever a
        # process says that it uses the copy (see `Depot.hold`).
        own = path.match(self._shards[shard].path)
        with self._locks.setdefault(shard, threading.Lock()):
            noted = self._noted.get(shard)
            if self._first_use and noted is None:
                check_digest(path, self._shards[shard])
            return self._settle(shard, path, own, noted.stamp if own and noted else None)

    def admit_again(self, shard: int) -> Stamp:
        """Note the new stamp of a shard that is open and was touched, if its digest is right."""
        path, stamp, own = self._noted[shard]
        return self._settle(shard, Path(path), own, stamp)

    def touched(self, shards: Int64s) -> list[int]:
        """Return those of distinct `shards`, int64 (n,), whose file has another stamp now.

        A file that was replaced or removed is not among them: the open file stays as it was.
        """
        found = []
        for shard in shards.tolist():
            path, stamp, own = self._noted[shard]
            try:
                status = patiently(partial(os.stat, path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise DataError(
                    f"shard {path}: whether it was changed cannot be seen: {error.strerror}"
                ) from None
            if FACTS(status) != stamp:
                now = Stamp.of(status, compare_ctime=own)
                if now != stamp and now.file == stamp.file:
                    found.append(shard)
        return found

    def _settle(self, shard: int, path: Path, own: bool, known: Stamp | None) -> Stamp:
        """Note the stamp of a file that is known to be right when it has the stamp `known`."""
        entry = self._shards[shard]
        if known is None:
            check_shard(path, entry)
        while True:
            try:
                stamp = Stamp.settled(path, compare_ctime=own)
            except OSError as error:
                check_shard(path, entry)  # says that it is missing
                raise DataError(f"shard {path} cannot be read: {error.strerror}") from None
            if known is not None:
                right = stamp == known
            else:
                right = not own or stamp.modified_ns <= self._since_ns
            if right:
                self._noted[shard] = _Noted(str(path), stamp, own)
                return stamp
            _check_touched(path, entry, stamp)
            known = stamp


def _check_touched(path: Path, entry: Shard, stamp: Stamp) -> None:
    """Compare the digest of a file that has another stamp than it should."""
    when = clock(max(stamp.modified_ns, stamp.changed_ns))
    log.warning("shard %s was touched at %s; comparing its digest with %s", path, when, FILE)
    try:
        check_digest(path, entry)
    except DataError as error:
        raise DataError(
            f"shard {path} was changed during the run, at {when} ({error}). Checkpoints "
            "from before then are good. Put the file back as it was (`python -m data_prep "
            f"inspect {path.parent} --verify` compares it), then resume the run"
        ) from None
