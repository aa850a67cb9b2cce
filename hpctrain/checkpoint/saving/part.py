"""The part of a checkpoint that one rank writes, in its own process or in that of its writer.

step-00000200.tmp/__3_0.distcp   the tensors and objects of rank 3, by DCP
                  .part-3        their sizes and digests, until rank 0 puts them together
"""

import errno
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hpctrain.checkpoint.files import manifest
from hpctrain.checkpoint.files.manifest import Manifest
from hpctrain.checkpoint.saving.shared_memory import Placed, places
from hpctrain.checkpoint.tensor_reader import Unpickler
from hpctrain.disk import open_regular, sync, why_unwritten

METADATA = ".metadata"
_PLAIN = (bool, int, float, str, type(None))


class Planner(DefaultSavePlanner):
    """Gives DCP the values of a rank; equal ones are pickled once.

    A state has the settings of an optimizer once for each parameter.
    """

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self._made: dict[Any, bytes] = {}

    def pickled(self, value: Any) -> bytes:
        """Return a value of the state that is no tensor as DCP writes it."""
        key = (type(value), repr(value)) if type(value) in _PLAIN else id(value)
        if key not in self._made:
            torch.save(value, stream := io.BytesIO())
            self._made[key] = stream.getvalue()
        return self._made[key]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a tensor as it is, and another value pickled."""
        is_value = write_item.type == WriteItemType.BYTE_IO
        return io.BytesIO(self.pickled(object)) if is_value else object

    @property
    def layout(self) -> list[Any]:
        """What the plan of this rank depends on: names, and kinds, shapes and dtypes of tensors."""
        return [
            (name, value.shape, value.dtype, getattr(value, "placements", None), type(value))
            if isinstance(value, torch.Tensor)
            else name
            for name, value in self.state_dict.items()
        ]


class Planned(FileSystemWriter):
    """What `dcp.save` writes with: it only takes what is to be written, and by which rank.

    A later save of the same layout uses it again. It is pickled once.
    """

    plan: SavePlan
    metadata: Metadata | None = None  # on rank 0
    content = b""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Take this rank's part; nothing is written."""
        self.plan = replace(plan, planner_data=None)  # only the metadata need it
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Take what is known of the whole checkpoint."""
        self.metadata = metadata

    def write_metadata(self, parts: list[dict[str, Any]]) -> None:
        """Write `.metadata`, with the places that the ranks have told."""
        storage = {index: info for part in parts for index, info in part["storage"].items()}
        results = [WriteResult(index, 0, info) for index, info in storage.items()]
        assert self.metadata is not None
        super().finish(self.metadata, [results])

    def __reduce__(self) -> Any:
        """Let the writer have it."""
        self.content = self.content or pickle.dumps((self.plan, self.metadata))
        return _planned, (self.path, self.content)


def _planned(folder: Path, content: bytes) -> Planned:
    found = Planned(folder)
    found.plan, found.metadata = pickle.loads(content)
    return found


class _Files(FileSystem):
    """Writes files to the disk, and computes their `facts` on the way, by name."""

    def __init__(self) -> None:
        self.facts: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open(path, mode) as file:
            yield (stream := _Stream(file))
            file.flush()
            os.fsync(file.fileno())
        self.facts[Path(path).name] = {
            "bytes": stream.size,
            "xxh3_128": stream.digest.hexdigest(),
        }


class _Stream(io.RawIOBase):
    """A file that is written from its first byte to its last one."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file, self.size, self.digest = file, 0, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size


@dataclass(frozen=True)
class Job:
    """The part of a rank: what it writes, and into which folder.

    `about` is the manifest without the files. `token` is of this save alone. A process that an
    attempt before has left may still write into a folder of the same name; rank 0 does not take its
    part for that of this save.
    """

    folder: Path
    rank: int
    token: str
    about: Manifest
    planned: Planned
    planner: Planner

    def write(self) -> str:
        """Write the files, with their digests, to the disk; return why it has failed, or "".

        A rank that is alone puts the checkpoint together, too.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writer = FileSystemWriter(self.folder, sync_files=False)  # `_Files` does it
            writer.fs = files = _Files()
            storage = writer.write_data(self.planned.plan, self.planner).value()
            places = {each.index: each.storage_data for each in storage}
            part = {"token": self.token, "files": files.facts, "storage": places}
            path = _part_path(self.folder, self.rank)
            unfinished = path.with_suffix(".tmp")
            unfinished.write_bytes(pickle.dumps(part))
            unfinished.rename(path)
        except Exception as error:
            return reason(error, self.folder)
        return self.put_together() if self.about.world_size == 1 else ""

    def put_together(self) -> str:
        """Write `.metadata` and the manifest from the parts of all ranks, to the disk, on rank 0.

        Return why it has failed, or "".
        """
        ranks = range(self.about.world_size)
        try:
            parts = [_read_part(self.folder, rank, self.token) for rank in ranks]
            self.planned.write_metadata(parts)
            files = {name: each for own in parts for name, each in own["files"].items()}
            files[METADATA] = facts(self.folder / METADATA)
            replace(self.about, files=files).write(self.folder)
            for rank in ranks:
                _part_path(self.folder, rank).unlink()
            sync(self.folder)
        except Exception as error:
            return reason(error, self.folder)
        return ""

    def staged(self) -> tuple["Job", list[torch.Tensor]]:
        """Return the job as the writer gets it, and the tensors, which it finds in its memory."""
        values: dict[MetadataIndex, Any] = {}
        tensors: dict[MetadataIndex, torch.Tensor] = {}
        for item in self.planned.plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value = self.planner.state_dict[item.index.fqn]
                values[item.index] = value if type(value) in _PLAIN else self.planner.pickled(value)
                continue
            tensor = self.planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            tensor = tensor.detach()
            if type(tensor) is torch.Tensor and tensor.layout == torch.strided:
                tensors[item.index] = tensor
            else:
                values[item.index] = tensor.cpu()
        values |= zip(tensors, places([*tensors.values()]), strict=True)
        return replace(self, planner=Staged(values)), [*tensors.values()]


class Staged(Planner):
    """Gives DCP what a rank has put into the shared memory: values by what they are there."""

    def __init__(self, values: dict[MetadataIndex, Any]) -> None:
        super().__init__()
        self._values = values
        self.placed = [value for value in values.values() if isinstance(value, Placed)]
        self.memory: NDArray[np.uint8] | None = None

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return a tensor, or another object as DCP pickles it."""
        value = self._values[write_item.index]
        if isinstance(value, Placed):
            assert self.memory is not None
            return value.within(self.memory)
        if isinstance(value, torch.Tensor):
            return value
        return io.BytesIO(value if isinstance(value, bytes) else self.pickled(value))


def _part_path(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says that it has written its part."""
    return folder / f".part-{rank}"


def _read_part(folder: Path, rank: int, token: str) -> dict[str, Any]:
    """Return the files and the places of a rank's part; an OSError if it is not there."""
    path = _part_path(folder, rank)
    with open_regular(path, parts=0) as file:
        found = Unpickler(file).load()
    if not isinstance(found, dict) or found.get("token") != token:
        raise OSError(errno.ESTALE, "it is of another save", str(path))
    return found


def facts(path: Path) -> dict[str, Any]:
    """Return the size and the digest of a file, which is on the disk after this."""
    sync(path)
    return {"bytes": path.stat().st_size, "xxh3_128": manifest.digest(path)}


def reason(error: BaseException, folder: Path) -> str:
    """Return why a file could not be written into a folder."""
    text = (str(error).strip() or repr(error)).splitlines()[-1]
    # PyTorch's writer drops the system's error, "enforce fail at ...", or the file.
    return (folder.is_dir() and why_unwritten(folder)) or text
