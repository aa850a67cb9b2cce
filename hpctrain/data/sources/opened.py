"""The open shards of a process: opened when they are needed, and all closed when there is no room.

What a read returns was read from unchanged files:

    read ── has each file still the stamp that it had when it was opened? ── yes: use the values
                └── no ── has it the digest that the index lists? ── yes: read again
                                                                  └── no: DataError

`Stamp` says what it is and what it guarantees. A digest reads the
whole file, but `touch`, `chmod` and hard links do not end a run.
"""

import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpctrain.base.errors import DataError
from hpctrain.base.files.mounts import kind_of
from hpctrain.data.places.origin import check_digest
from hpctrain.data.places.placement import ShardPlace
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import FILE, Shard, check_shard
from hpctrain.data.shards.storage.file import FACTS, Stamp, clock, patiently
from hpctrain.data.shards.storage.layout import ShardLayout
from hpctrain.data.shards.types import Int64s
from hpctrain.data.sources.datasets import Datasets

log = logging.getLogger(__name__)


class _ShardWatch:
    """The stamps of the shards that a process has opened, by their numbers in `shards`.

    A file that was written after `since_ns`, when the run began to read the data set, is compared
    with its digest when it is first opened; with `first_use`, each file is.
    """

    def __init__(self, shards: Sequence[Shard], since_ns: int, first_use: bool) -> None:
        self._shards, self._since_ns, self._first_use = shards, since_ns, first_use
        self._noted: dict[int, tuple[Path, Stamp]] = {}
        self._locks: dict[int, threading.Lock] = {}

    def admit(self, shard: int, path: Path) -> Stamp:
        """Note and return the stamp of a shard, which is opened or was touched, if it is right."""
        with self._locks.setdefault(shard, threading.Lock()):
            noted = self._noted.get(shard)
            if self._first_use and noted is None:
                check_digest(path, self._shards[shard])
            return self._settle(shard, path, noted[1] if noted and noted[0] == path else None)

    def touched(self, shards: Int64s) -> list[int]:
        """Return those of distinct `shards`, int64 (n,), whose file has another stamp now.

        A file that was replaced or removed is not among them: the open file stays as it was.
        """
        found = []
        for shard in shards.tolist():
            path, stamp = self._noted[shard]
            try:
                status = patiently(partial(os.stat, path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise DataError(
                    f"shard {path}: whether it was changed cannot be seen: {error.strerror}"
                ) from None
            if FACTS(status) != stamp and Stamp.of(status).file == stamp.file:
                found.append(shard)
        return found

    def _settle(self, shard: int, path: Path, known: Stamp | None) -> Stamp:
        """Note the stamp of a file that is known to be right when it has the stamp `known`."""
        entry = self._shards[shard]
        if known is None:
            check_shard(path, entry)
        while True:
            try:
                stamp = Stamp.settled(path)
            except OSError as error:
                check_shard(path, entry)  # says that it is missing
                raise DataError(f"shard {path} cannot be read: {error.strerror}") from None
            # A staged copy, of another name, was compared when it was made.
            as_listed = not path.match(entry.path) or stamp.modified_ns <= self._since_ns
            if stamp == known or (known is None and as_listed):
                self._noted[shard] = path, stamp
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


T = TypeVar("T")


class OpenShards:
    """Shards that are opened when they are first needed. Threads may share them, processes not.

    A shard is known by its number in `shards`. Uncompressed, contiguous data is `mapped`, but read
    on network file systems. `_ShardWatch` explains the rest.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        place: ShardPlace,
        fields: Mapping[str, Field],
        mapped: bool,
        since_ns: int,
        first_use: bool,
    ) -> None:
        self._shards, self._place, self._fields, self._mapped = shards, place, fields, mapped
        self._kind = cache(kind_of)
        # What is full is retired: it ends when nobody reads from it.
        self._datasets = self._retired = Datasets(shards, fields)
        self._changed = threading.Condition()
        self._watch = _ShardWatch(shards, since_ns, first_use)
        self._admitting = threading.Lock()
        self._admitted_again = 0  # how often an open shard was touched, and was still right

    def read(self, shards: Int64s, action: Callable[[Datasets], T]) -> T:
        """Call `action`, which reads from `shards`, int64 (n,), and return what it returns.

        If a file was touched meanwhile, it is called again; if one was changed, that is a
        DataError.
        """
        shards = np.unique(shards)
        while True:
            with self.held(shards) as datasets:
                before = self._admitted_again
                try:
                    found = action(datasets)
                except DataError:  # perhaps what is damaged has just been written
                    if self._unchanged(datasets, shards):
                        raise
                    continue
                # Another thread may have seen it first.
                if self._unchanged(datasets, shards) and self._admitted_again == before:
                    return found

    @contextmanager
    def held(self, shards: Int64s) -> Iterator[Datasets]:
        """Open distinct `shards`, int64 (n,), at most `at_once`, until the context ends."""
        datasets = self._opened(shards)
        try:
            yield datasets
        finally:
            with self._changed:
                datasets.users -= 1
                self._changed.notify_all()

    @property
    def at_once(self) -> int:
        """How many spans of different shards may be held at the same time."""
        limit = self._limit(self._datasets)
        return 2**62 if limit >= len(self._shards) else max(1, limit // 4)

    def _opened(self, shards: Int64s) -> Datasets:
        """Return datasets that have these shards, with one user more."""
        while True:
            datasets = self._datasets
            missing = shards[~datasets.is_open[shards]].tolist()
            # Outside the lock, because it may wait for a copy.
            paths = [self._place.path(self._shards[shard]) for shard in missing]
            stamps = [self._watch.admit(*each) for each in zip(missing, paths, strict=True)]
            with self._changed:
                if datasets is not self._datasets:
                    continue
                # Another thread may have opened some meanwhile.
                each = zip(missing, paths, stamps, strict=True)
                new = [one for one in each if not datasets.is_open[one[0]]]
                open_then = len(datasets.layouts) + len(new)
                if new and datasets.layouts and open_then > self._limit(datasets):
                    self._retire(datasets)
                    continue
                for shard, path, stamp in new:
                    datasets.add(shard, self._layout(shard, path, stamp))
                datasets.users += 1
                return datasets

    def _retire(self, datasets: Datasets) -> None:
        """Begin with no open shard, after those that were retired before have ended."""
        if self._retired is not datasets and self._retired.users:
            self._changed.wait()
        else:
            self._retired, self._datasets = datasets, Datasets(self._shards, self._fields)

    @staticmethod
    def _limit(datasets: Datasets) -> int:
        """Return how many shards may be open at the same time."""
        # A shard that is not mapped keeps a file descriptor, and a process has few of them. Before
        # the first shard is open, it is unknown how they are stored.
        if datasets.all_mapped and datasets.layouts:
            return datasets.slots
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1: no limit
        return min(datasets.slots, max(16, descriptors // 8) if descriptors > 0 else 4096)

    def _unchanged(self, datasets: Datasets, shards: Int64s) -> bool:
        """Return whether no held shard was touched since it was opened."""
        touched = self._watch.touched(shards)
        for shard in touched:
            self._admit_again(datasets, shard)
        return not touched

    def _admit_again(self, datasets: Datasets, shard: int) -> None:
        with self._admitting:
            if self._watch.touched(np.array([shard])):  # no other thread was faster
                path = datasets.layouts[shard].path
                stamp = self._watch.admit(shard, path)
                # The mapping stays. Other readers know the file by the time of its last write.
                datasets.layouts[shard] = self._layout(shard, path, stamp)
                self._admitted_again += 1

    def _layout(self, shard: int, path: Path, stamp: Stamp) -> ShardLayout:
        mapped = self._mapped and self._kind(path.parent) != "network"
        layout = ShardLayout(path, self._shards[shard], self._fields, mapped=mapped)
        layout.check_is(stamp)
        return layout
