"""Reads checkpoints of torch.distributed.checkpoint (DCP) without running code from them.

    .metadata       a pickle: only DCP's own classes, dtypes and sizes are made from it
    __0_0.distcp    tensors, and pickles of other objects: read by torch.load with weights_only

DCP itself unpickles `.metadata` and objects as they come, and a pickle can call any function. A
checkpoint may be somebody else's, and a digest only shows that it is as its writer left it.
"""

import io
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hpctrain.base.errors import StorageError
from hpctrain.base.terminal.terminal import few
from hpctrain.engine.checkpoint import metadata_file
from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.tensors import dtype_name, local
from hpctrain.runs.checkpoints.matching import fits, misshapen

_SHOWN = 4  # weights that do not fit
_AT_ONCE = 64 << 20  # bytes that replicas send each other in one message


class TensorReader(dcp.FileSystemReader):
    """A reader of one checkpoint, for `dcp.load`.

    `saved` is what is known of each entry of the saved state, by its dotted name. `metadata` is
    what another rank got from `metadata_file.read`. The ranks of each group of `replicas` divide
    the files that all of them need, and send each other what they have read.
    """

    def __init__(
        self, checkpoint: Path, metadata: bytes = b"", replicas: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        super().__init__(checkpoint)
        self._replicas, self.folder = replicas, checkpoint
        self._metadata = metadata_file.parse(metadata or metadata_file.read(checkpoint), checkpoint)
        self.saved = self._metadata.state_dict_metadata

    def part(self, name: str) -> dict[str, Any]:
        """Return what is known of the entries of a part, such as `model`, by their names in it."""
        start = f"{name}."
        return {k.removeprefix(start): e for k, e in self.saved.items() if k.startswith(start)}

    def load(self, state: dict[str, Any], *, no_dist: bool = False) -> None:
        """Load into the tensors of `state`, in place; other objects are replaced.

        All ranks call this with the same names; with `no_dist` this process loads alone.
        """
        parts = [each for each in state.values() if isinstance(each, dict)]
        with copies_apart(parts) as differ, warnings.catch_warnings():
            # torch says that there is no process group, even with no_dist.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                dcp.load(state, storage_reader=self, planner=_Planner(), no_dist=no_dist)
            except dcp.api.CheckpointException as error:
                first = next(iter(error.failures.values()))[0]
                if isinstance(first, StorageError):
                    raise first from None
                raise StorageError(
                    f"{self.folder}: it cannot be loaded ({type(first).__name__}: {first})"
                ) from error
        if not no_dist and dist.is_initialized():
            differ = [pair for each in objects.all_gather(differ) for pair in each]
        if differ:
            raise StorageError(
                f"{' and '.join(differ[0])} differ in the checkpoint, and are one parameter in "
                "this model: it is the checkpoint of another model"
            )

    def read_metadata(self, *_: Any, **__: Any) -> classes.Metadata:
        """Return the metadata, which was read before."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says, one file after the other; replicas share what is alike."""
        items, done = plan.items, Future[None]()
        done.set_result(None)
        for group in self._replicas:
            shared, items = _divided(items, planner, group)
            if not self._read_together(shared, planner, group):
                return done  # the rank that has failed tells all others
        self._read(items, planner)
        return done

    def _by_file(self, items: Iterable[ReadItem]) -> dict[str, list[ReadItem]]:
        found: dict[str, list[ReadItem]] = defaultdict(list)
        for item in items:
            found[self.storage_data[item.storage_index].relative_path].append(item)
        return found

    def _read_together(
        self, items: Sequence[ReadItem], planner: LoadPlanner, group: dist.ProcessGroup
    ) -> bool:
        """Let one rank of the group read each file for all; return False if any rank cannot."""
        files, error = self._by_file(items), None
        readers = [(n % dist.get_world_size(group), files[name]) for n, name in enumerate(files)]
        try:
            for reader, part in readers:
                self._read(part if reader == dist.get_rank(group) else (), planner)
        except Exception as problem:  # the others must not wait for what this rank has not read
            error = problem
        wrong = any(objects.all_gather(error is not None))
        if error is not None:
            raise error
        for reader, part in () if wrong else readers:
            wanted = [planner.resolve_tensor(item).detach() for item in part]
            whole = [each.contiguous() for each in wanted]
            raw = [each.view(-1).view(torch.uint8) for each in whole if each.numel()]
            dist._broadcast_coalesced(group, raw, _AT_ONCE, reader)  # gloo does not know all dtypes
            for own, read in zip(wanted, whole, strict=True):
                own.copy_(read)
        return not wrong

    def _read(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        for name, part in self._by_file(items).items():
            try:
                super().read_data(LoadPlan(part), planner)
            except pickle.UnpicklingError as error:
                found = re.search(r"(?:GLOBAL|global:?) `?([\w.]+)", str(error))
                what = f" ({found[1]})" if found else ""
                raise StorageError(
                    f"{self.folder / name}: it holds an object{what} that could run code when it "
                    "is loaded, so it is not; torch.serialization.add_safe_globals in a module of "
                    "yours allows a class that you trust"
                ) from error


def _divided(
    items: list[ReadItem], planner: LoadPlanner, group: dist.ProcessGroup
) -> tuple[list[ReadItem], list[ReadItem]]:
    """Return the items of what the group has alike, such as `model`, in one order, and the rest."""
    devices, parts = dist.get_backend_config(group), dict[str, dict[str, ReadItem]]()
    for item in sorted((i for i in items if i.type == LoadItemType.TENSOR), key=str):
        if (device := planner.resolve_tensor(item).device.type) in devices:
            part = item.dest_index.fqn.partition(".")[0]
            parts.setdefault(part, {})[f"{device} {item}"] = item
    own = {part: xxhash.xxh3_128_hexdigest("".join(each).encode()) for part, each in parts.items()}
    every = objects.all_gather(own, group)
    alike = [part for part in sorted(own) if all(each.get(part) == own[part] for each in every)]
    shared = {item: None for part in alike for item in parts[part].values()}
    return [*shared], [item for item in items if item not in shared]


def misfit(
    saved: Mapping[str, Any], state: Mapping[str, Any], part: str, *, divided: bool = False
) -> str:
    """Return which weights of a checkpoint are not those of the model; "" if all fit.

    torch's own text about this is a traceback that names one of them, and a weight that only the
    checkpoint has would be left out without a word.

    `part` is the first part of the model's names in the checkpoint, such as `model`. If the ranks
    have different weights (`divided`), as in a pipeline, all of them call this together.
    """
    own = list(_differences(saved, state, part))
    there = {key.removeprefix(f"{part}.") for key in saved if key.startswith(f"{part}.")}
    foreign = there - state.keys()
    if divided:
        known = objects.all_gather((own, sorted(foreign)))
        own = [text for texts, _ in known for text in texts]
        foreign = set.intersection(*({*names} for _, names in known))
    found = [*dict.fromkeys(own), *(f"{n} is not in the model" for n in sorted(foreign))]
    return few(found, _SHOWN, "; ")


def _differences(saved: Mapping[str, Any], state: Mapping[str, Any], part: str) -> Iterator[str]:
    """Yield which weights of the model a checkpoint lacks, or has in another shape."""
    for name, value in state.items():
        entry = saved.get(f"{part}.{name}")
        if entry is None:
            yield f"{name} is not in the checkpoint"
        elif isinstance(value, torch.Tensor) and isinstance(entry, classes.TensorStorageMetadata):
            there, here = tuple(entry.size), tuple(value.shape)
            if there != here:
                yield misshapen(name, there, here)


@contextmanager
def copies_apart(parts: Iterable[dict[str, Any]]) -> Iterator[list[tuple[str, str]]]:
    """Let what is loaded within the context have one tensor for each name of a shared parameter.

    Else the last value would win. At the end the list that is yielded has the pairs of names of
    which this rank has found different values.
    """
    apart: list[tuple[dict[str, Any], str, str, torch.Tensor]] = []
    differ: list[tuple[str, str]] = []
    for part in parts:
        first: dict[tuple[Any, ...], str] = {}
        for name, value in part.items():
            if isinstance(value, torch.Tensor) and local(value).numel():
                place = (local(value).data_ptr(), value.shape, value.dtype)
                if (same := first.setdefault(place, name)) != name:
                    apart.append((part, name, same, value))
    for part, name, _, value in apart:
        part[name] = torch.empty_like(value)
    yield differ
    for part, name, same, value in apart:
        if not torch.equal(local(part[name]), local(value)):
            differ.append((same, name))
        part[name] = value


class _Planner(DefaultLoadPlanner):
    """DCP's planner, which loads other objects as safely, and numbers of the same kind only."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, value in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if isinstance(value, torch.Tensor) and isinstance(entry, classes.TensorStorageMetadata):
                there, own = dtype_name(entry.properties.dtype), dtype_name(value.dtype)
                if not fits(there, own):
                    raise StorageError(
                        f"{name} is {there} in the checkpoint and {own} here: the numbers would "
                        "not mean the same"
                    )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = torch.load(value, weights_only=True)
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, content)
