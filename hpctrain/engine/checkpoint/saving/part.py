"""The part of a checkpoint that one rank writes, in its own process or in that of its writer.

step-00000200.tmp/__3_0.distcp   the tensors and objects of rank 3, by DCP
                  .part-3        their sizes and digests, until rank 0 puts them together
"""

import errno
import io
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hpctrain.base.files.disk import open_regular, sync, why_unwritten
from hpctrain.engine.checkpoint.metadata_file import Unpickler
from hpctrain.engine.checkpoint.saving.shared_memory import Placed, places, sampled
from hpctrain.runs.checkpoints import manifest

_PLAIN = (bool, int, float, str, type(None))


class Planned(FileSystemWriter):
    """What `dcp.save` writes with: it only takes what is to be written, and by which rank.

    A later save uses it again if all ranks have the same names, types, shapes and shards.
    """

    plan: SavePlan
    metadata: Metadata  # on rank 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Take this rank's part; nothing is written."""
        self.plan = plan
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
        super().finish(self.metadata, [results])


@dataclass(frozen=True)
class RankPart:
    """The part of a rank: what it writes, and into which folder.

    `token` is of this save alone. A process that an attempt before has left may still write into a
    folder of the same name; rank 0 does not take its part for that of this save.
    """

    folder: Path
    rank: int
    token: str
    plan: SavePlan
    planner: DefaultSavePlanner

    def write(self) -> str:
        """Write the files, with their digests, to the disk; return why it has failed, or ""."""
        try:
            self.folder.mkdir(exist_ok=True)
            storage = FileSystemWriter(self.folder).write_data(self.plan, self.planner).value()
            files = {p.name: facts(p) for p in self.folder.glob(f"__{self.rank}_*")}
            places = {each.index: each.storage_data for each in storage}
            part = {"token": self.token, "files": files, "storage": places}
            path = part_path(self.folder, self.rank)
            unfinished = path.with_suffix(".tmp")
            unfinished.write_bytes(pickle.dumps(part))
            unfinished.rename(path)
        except Exception as error:
            return reason(error, self.folder)
        return ""

    def staged(self) -> tuple["RankPart", list[torch.Tensor]]:
        """Return the job as the writer gets it, and the tensors, which it finds in its memory."""
        values: dict[MetadataIndex, Any] = {}
        tensors: dict[MetadataIndex, torch.Tensor] = {}
        for item in self.plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value = self.planner.state_dict[item.index.fqn]
                values[item.index] = value if _is_plain(value) else _pickled(value)
                continue
            tensor = self.planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            tensor = tensor.detach()
            if type(tensor) is torch.Tensor and tensor.layout == torch.strided:
                tensors[item.index] = tensor
            else:
                values[item.index] = tensor.cpu()
        all_tensors = [*tensors.values()]
        values |= zip(tensors, places(all_tensors), strict=True)
        plan = replace(self.plan, planner_data=None)  # only rank 0 needs it, and has it
        planner = Staged(values, sampled(all_tensors))
        return replace(self, plan=plan, planner=planner), all_tensors


class Staged(DefaultSavePlanner):
    """Gives DCP what a rank has put into the shared memory: values by what they are there.

    `expected` is what `sampled` has said of the tensors before they were copied.
    """

    def __init__(self, values: dict[MetadataIndex, Any], expected: bytes) -> None:
        super().__init__()
        self._values, self._expected = values, expected
        self.placed = [value for value in values.values() if isinstance(value, Placed)]
        self.memory: NDArray[np.uint8] | None = None

    def is_copy(self, memory: NDArray[np.uint8]) -> bool:
        """Return whether the tensors in the memory are those of the rank, as far as one looks."""
        return sampled(place.within(memory) for place in self.placed) == self._expected

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return a tensor, or another object as DCP pickles it."""
        value = self._values[write_item.index]
        if isinstance(value, Placed):
            assert self.memory is not None
            return value.within(self.memory)
        if isinstance(value, torch.Tensor):
            return value
        return io.BytesIO(value if isinstance(value, bytes) else _pickled(value))


def _is_plain(value: Any) -> bool:
    """Return whether the writer gets the value itself, and pickles it for DCP."""
    return all(type(each) in _PLAIN for each in (value if type(value) is tuple else [value]))


def _pickled(value: Any) -> bytes:
    torch.save(value, stream := io.BytesIO())
    return stream.getvalue()


def part_path(folder: Path, rank: int) -> Path:
    """Return the file in which a rank says that it has written its part."""
    return folder / f".part-{rank}"


def read_part(folder: Path, rank: int, token: str) -> dict[str, Any]:
    """Return the files and the places of a rank's part; an OSError if it is not there."""
    path = part_path(folder, rank)
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
