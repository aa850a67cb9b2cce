"""Writes the weights of a run as safetensors, one file at a time.

checkpoint ── the tensors of one file ── adapters merged? ── layout ── dtype ── model-00001-of-…

The model itself is only built on the meta device, so the memory is that of one file.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from hpctrain.base import offered, secrets
from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import sync
from hpctrain.base.version import __version__
from hpctrain.config.sections import ModelSections
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.checkpoint.starting_point import compare
from hpctrain.engine.checkpoint.stored_weights import StoredWeights, open_weights
from hpctrain.engine.distributed.tensors import dtype_name, wide
from hpctrain.engine.layers.lora import Adapted, is_adapter
from hpctrain.engine.layers.ties import ties
from hpctrain.engine.parallel.precision import DTYPES, default_dtype
from hpctrain.engine.parallel.preparing.whole_model import with_adapters
from hpctrain.results.exporting.layouts import ExportLayout, layout_of, peft_format
from hpctrain.results.trained_model import check_base
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.runs.checkpoints.matching import renames
from hpctrain.runs.checkpoints.weight_files import WeightFiles
from hpctrain.runs.chosen_checkpoint import verified


@dataclass(frozen=True)
class Exported:
    """What was written: the names of the files, the bytes of the weights, the layout in words."""

    files: list[str]
    nbytes: int
    kind: str


class Exporter:
    """The weights of one checkpoint of a run.

    `merge` adds adapters (LoRA) to the weights; otherwise they alone are written. `dtype` is the
    format of floating-point weights; None means that of the training. With `ema` the parameters are
    their moving average (`train.ema`).
    """

    def __init__(
        self,
        sections: ModelSections,
        checkpoint: Path,
        *,
        merge: bool = False,
        dtype: str | None = None,
        ema: bool = False,
    ) -> None:
        self._sections, self._checkpoint = sections, checkpoint
        lora, precision = sections.lora, sections.precision
        if merge and not lora.patterns:
            raise ConfigError("--merge: the run has no adapters (train.lora); leave it out")
        if lora.patterns:
            check_base(sections.start, checkpoint)
        with default_dtype(precision):
            self._model = with_adapters(_skeleton(sections.model), lora)
        self._float = DTYPES[dtype or precision.params]
        state = self._model.state_dict()
        self._own = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
        groups = [[first, *others] for first, others in ties(self._model)]
        self._same = {name: group for group in groups for name in group}
        self._saved = open_weights(WeightFiles(checkpoint, None))
        self._average = open_weights(WeightFiles(checkpoint, None), "ema") if ema else None
        if self._average is not None and not self._average.shapes:
            raise ConfigError("--ema: the checkpoint has no average (train.ema); leave it out")
        self._merge, self._only_adapters = merge, bool(lora.patterns) and not merge
        if unknown := [name for name in self._saved.shapes if name not in self._own]:
            raise StorageError(
                f"{checkpoint} has {unknown[0]}: it is the checkpoint of another model"
            )
        if merge:
            _ = self._base  # read now, since it may be gone
        self._layout = self._chosen_layout()

    def write(self, folder: Path, shard_bytes: int, shown: Callable[[str], None]) -> Exported:
        """Write the files into an empty folder; `shown` is called with each name, beforehand.

        A file has at most `shard_bytes`, unless it has a single tensor. Adapters are one file.
        """
        layout = self._layout
        # peft reads adapters from one file.
        limit = math.inf if self._only_adapters else shard_bytes
        groups = list(self._grouped(limit))
        stem = "adapter_model" if self._only_adapters else "model"
        names = [f"{stem}.safetensors"]
        if (count := len(groups)) > 1:
            names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        places: dict[str, str] = {}
        total = 0
        for name, group in zip(names, groups, strict=True):
            shown(name)
            total += self._write_file(folder / name, group)
            places |= dict.fromkeys(group, name)
        if len(names) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            _write(folder / f"{stem}.safetensors.index.json", index)
        if self._only_adapters:
            _write(folder / "adapter_config.json", layout.config)
        elif layout.config is not None:
            _write(folder / "config.json", layout.config | {"dtype": dtype_name(self._float)})
        _write(folder / "hpctrain.json", self._origin())
        return Exported(names, total, layout.kind)

    def _write_file(self, path: Path, sources: Mapping[str, str]) -> int:
        """Write one file, and return the bytes of its tensors, which are gone afterwards."""
        tensors = {name: self._weight(own).to(self._dtype(own)) for name, own in sources.items()}
        try:
            save_file(tensors, path, {"format": "pt"})
            sync(path)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{path}: cannot be written ({error})") from error
        return sum(value.nbytes for value in tensors.values())

    def _chosen_layout(self) -> ExportLayout:
        if self._only_adapters:
            lora, start = self._sections.lora, self._sections.start
            return peft_format(self._model, self._saved.shapes, lora, start.init_from)
        self._refuse_parted()
        names = [n for n in self._own if not is_adapter(n) and self._same.get(n, [n])[0] == n]
        return layout_of(self._model, names)

    def _refuse_parted(self) -> None:
        """Refuse to merge an adapter with a parameter that another module has as well."""
        for group in self._same.values():
            places = (name.rpartition(".")[0] for name in group)
            modules = {id(m): m for m in map(self._model.get_submodule, places)}
            if len(modules) > 1 and any(isinstance(m, Adapted) for m in modules.values()):
                raise ConfigError(
                    f"--merge: {' and '.join(sorted(group))} are one parameter of this model, and "
                    "its adapter belongs to one of them: merged, they would be two. Export the "
                    "adapters alone, without --merge"
                )

    def _grouped(self, limit: float) -> Iterator[dict[str, str]]:
        """Yield the tensors of each file, with the weights that they are."""
        group, size = dict[str, str](), 0
        for name, own in self._layout.sources.items():
            nbytes = self._own[own].numel() * self._dtype(own).itemsize
            if group and size + nbytes > limit:
                yield group
                group, size = {}, 0
            group[name] = own
            size += nbytes
        yield group

    def _weight(self, name: str) -> torch.Tensor:
        """Return a weight as it was trained, with its adapter if that is merged."""
        like = self._own[name]
        own = DTYPES[self._sections.precision.params]
        target = torch.empty(like.shape, dtype=own if like.is_floating_point() else like.dtype)
        if not self._load(name, target):
            weights, stored = self._base if self._sections.lora.patterns else (None, {})
            there = next((stored[n] for n in self._names(name) if n in stored), None)
            if weights is None or there is None:
                raise StorageError(f"{self._checkpoint} has no {name}: it is that of another model")
            weights.load({there: target})
        module, _, key = name.rpartition(".")
        layer = self._model.get_submodule(module)
        if self._merge and key == "weight" and isinstance(layer, Adapted):
            for part in ("lora_A", "lora_B"):
                value = torch.empty(getattr(layer, part).shape, dtype=own)
                self._load(f"{module}.{part}", value)
                setattr(layer, part, nn.Parameter(value, requires_grad=False))
            if self._sections.lora.quantize:
                # The adapters were trained beside these weights.
                target = offered.quantized.rounded(target)
            target = (wide(target) + layer.change()).to(own)
        return target

    def _load(self, name: str, target: torch.Tensor) -> bool:
        """Load a weight of the checkpoint; return whether it is there, under any of its names."""
        for each in filter(None, (self._average, self._saved)):
            for other in self._names(name):
                if other in each.shapes:
                    if each.shapes[other] != tuple(target.shape):
                        raise StorageError(
                            f"{self._checkpoint} has no {name} of shape {tuple(target.shape)}: it "
                            "is the checkpoint of another model"
                        )
                    each.load({other: target})
                    return True
        return False

    def _names(self, name: str) -> list[str]:
        """Return all names of a weight, itself first."""
        return [name, *self._same.get(name, [])]

    def _dtype(self, name: str) -> torch.dtype:
        like = self._own[name]
        return self._float if like.is_floating_point() else like.dtype

    @cached_property
    def _base(self) -> tuple[StoredWeights, Mapping[str, str]]:
        """What reads the weights that the adapters belong to, and the stored name of each."""
        start = self._sections.start
        weights = open_weights(verified(start, self._sections.output_dir))
        found = compare(self._model, weights, renames(start.init_rename), start.init_skip)
        return weights, found.stored

    def _origin(self) -> dict[str, Any]:
        found = Manifest.read(self._checkpoint)
        return {
            "run": self._checkpoint.parents[1].name,
            "step": found.step,
            "checkpoint": WeightFiles(self._checkpoint, None).digest(),
            "base": found.base or None,
            "merged": self._merge,
            "model": self._sections.model,
            "hpctrain": __version__,
        }


def _skeleton(section: Mapping[str, Any]) -> nn.Module:
    """Return the model on the meta device, or on the CPU if it cannot be built there."""
    try:
        with torch.device("meta"):
            return instantiate("model", section)  # type: ignore[no-any-return]
    except Exception:  # the constructor reads a value; what is wrong with it is raised below
        return instantiate("model", section)  # type: ignore[no-any-return]


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(secrets.referenced(content), indent=2, default=str) + "\n")
    sync(path)
