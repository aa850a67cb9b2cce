"""Writes the weights of a run as safetensors, one file at a time.

checkpoint ── the tensors of one file ── adapters merged? ── layout ── dtype ── model-00001-of-…

The model itself is only built on the meta device, so the memory is that of one file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from hpctrain import __version__
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.matching import match, renames
from hpctrain.checkpoint.stored_weights import StoredWeights, open_weights
from hpctrain.checkpoint.weight_files import WeightFiles
from hpctrain.config.schema import Config
from hpctrain.disk import sync
from hpctrain.errors import ConfigError, StorageError
from hpctrain.job.building.make import make
from hpctrain.job.building.trained_model import check_base
from hpctrain.models.lora import Adapted, adapted, add_adapters, is_adapter
from hpctrain.models.quantized import rounded
from hpctrain.parallel.preparing.parameters import ties
from hpctrain.runs.weights_digest import verified
from hpctrain.trained.layouts import Layout, Piece, layout_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PEFT = "base_model.model."


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: The names of the files of weights.
        nbytes: The bytes of the weights.
        kind: The layout, in words.
    """

    files: list[str]
    nbytes: int
    kind: str


class Exporter:
    """The weights of one checkpoint of a run.

    Args:
        config: The frozen config of the run.
        checkpoint: The folder of the checkpoint.
        merge: Whether adapters (LoRA) are added to the weights; otherwise they alone are written.
        dtype: The format of floating-point weights; None means that of the training.
        ema: Whether the parameters are their moving average (`train.ema`).

    Raises:
        ConfigError: The model cannot be built, or there are no adapters to merge.
        StorageError: The checkpoint cannot be read, or its adapters belong to other weights.
    """

    def __init__(
        self,
        config: Config,
        checkpoint: Path,
        *,
        merge: bool = False,
        dtype: str | None = None,
        ema: bool = False,
    ) -> None:
        self._config, self._checkpoint = config, checkpoint
        lora = config.train.lora
        if merge and not lora.patterns:
            raise ConfigError("--merge: the run has no adapters (train.lora); leave it out")
        self._model = _skeleton(config)
        if lora.patterns:
            check_base(config, checkpoint)
            add_adapters(self._model, lora.patterns, lora.rank, lora.alpha)
        self._float = _DTYPES[dtype or config.precision.params]
        state = self._model.state_dict()
        same = {other for _, others in ties(self._model) for other in others}
        self._own = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name not in same
        }
        self._saved = open_weights(WeightFiles(checkpoint, None))
        self._average = open_weights(WeightFiles(checkpoint, None), "ema") if ema else None
        if self._average is not None and not self._average.shapes:
            raise ConfigError("--ema: the checkpoint has no average (train.ema); leave it out")
        self._layers: dict[str, Adapted] = dict(adapted(self._model))
        self._merge, self._only_adapters = merge, bool(lora.patterns) and not merge
        self._base: tuple[StoredWeights, Mapping[str, str]] | None = None
        if merge:
            self._base = self._matched_base()

    def write(self, folder: Path, shard_bytes: int, shown: Callable[[str], None]) -> Exported:
        """Write the files.

        Args:
            folder: Empty.
            shard_bytes: A file is not larger, unless it has a single tensor.
            shown: Called with the name of each file, before it is written.
        """
        layout = self._layout()
        groups = list(self._grouped(layout.pieces, shard_bytes))
        stem = "adapter_model" if self._only_adapters else "model"
        names = [
            f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors"
            if len(groups) > 1
            else f"{stem}.safetensors"
            for i in range(1, len(groups) + 1)
        ]
        places: dict[str, str] = {}
        total = 0
        for name, pieces in zip(names, groups, strict=True):
            shown(name)
            total += self._write_file(folder / name, pieces)
            places |= {piece.name: name for piece in pieces}
        if len(names) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            _write(folder / f"{stem}.safetensors.index.json", index)
        if self._only_adapters:
            _write(folder / "adapter_config.json", self._adapter_config())
        elif layout.config is not None:
            dtype = str(self._float).removeprefix("torch.")
            _write(folder / "config.json", layout.config | {"dtype": dtype})
        _write(folder / "hpctrain.json", self._origin())
        return Exported(names, total, layout.kind)

    def _write_file(self, path: Path, pieces: list[Piece]) -> int:
        """Write one file, and return the bytes of its tensors, which are gone afterwards."""
        tensors = {piece.name: self._tensor(piece) for piece in pieces}
        save_file(tensors, path, {"format": "pt"})
        sync(path)
        return sum(value.nbytes for value in tensors.values())

    def _layout(self) -> Layout:
        if not self._only_adapters:
            return layout_of(self._model, [name for name in self._own if not is_adapter(name)])
        pieces = []
        for name in self._saved.shapes:
            if name in self._own:
                key = f"{name}.weight" if is_adapter(name) else name
                pieces.append(Piece(_PEFT + key, (name,)))
        return Layout(pieces, None, "adapters of peft")

    def _grouped(self, pieces: list[Piece], limit: int) -> Iterator[list[Piece]]:
        group: list[Piece] = []
        size = 0
        for piece in pieces:
            nbytes = sum(
                math.prod(self._own[name].shape) * self._dtype(name).itemsize
                for name in piece.sources
            )
            if group and size + nbytes > limit:
                yield group
                group, size = [], 0
            group.append(piece)
            size += nbytes
        yield group

    def _tensor(self, piece: Piece) -> torch.Tensor:
        whole = piece.made(*(self._weight(name) for name in piece.sources))
        return whole.to(self._dtype(piece.sources[0])).contiguous()

    def _weight(self, name: str) -> torch.Tensor:
        """Return a weight as it was trained, with its adapter if that is merged."""
        like = self._own[name]
        own = _DTYPES[self._config.precision.params]
        target = torch.empty(like.shape, dtype=own if like.is_floating_point() else like.dtype)
        if name in self._saved.shapes or self._base is None:
            self._load(self._saved, name, target)
        else:
            weights, stored = self._base
            if name not in stored:
                raise StorageError(f"{self._checkpoint}: {name} is neither in it nor in its base")
            weights.load({stored[name]: target})
        module, _, key = name.rpartition(".")
        if self._merge and key == "weight" and (layer := self._layers.get(module)) is not None:
            for part in ("lora_A", "lora_B"):
                value = torch.empty(getattr(layer, part).shape, dtype=own)
                self._load(self._saved, f"{module}.{part}", value)
                setattr(layer, part, nn.Parameter(value, requires_grad=False))
            if self._config.train.lora.quantize:
                target = rounded(target)  # the adapters were trained beside these weights
            target = (target.float() + layer.change()).to(own)
        return target

    def _load(self, weights: StoredWeights, name: str, target: torch.Tensor) -> None:
        if self._average is not None and name in self._average.shapes:
            weights = self._average
        if name not in weights.shapes:
            first = {other: first for first, others in ties(self._model) for other in others}
            near = [other for other, same in first.items() if same == name]
            name = next((other for other in near if other in weights.shapes), name)
        if weights.shapes.get(name) != tuple(target.shape):
            raise StorageError(
                f"{self._checkpoint} has no {name} of shape {tuple(target.shape)}: it is the "
                "checkpoint of another model"
            )
        weights.load({name: target})

    def _dtype(self, name: str) -> torch.dtype:
        like = self._own[name]
        return self._float if like.is_floating_point() else like.dtype

    def _matched_base(self) -> tuple[StoredWeights, Mapping[str, str]]:
        start = self._config.checkpoint
        weights = open_weights(verified(self._config))
        model = {n: tuple(v.shape) for n, v in self._own.items() if not is_adapter(n)}
        found = match(weights.shapes, model, renames(start.init_rename), start.init_skip)
        return weights, found.stored

    def _adapter_config(self) -> dict[str, Any]:
        lora = self._config.train.lora
        whole = {n.rpartition(".")[0] for n in self._saved.shapes if not is_adapter(n)}
        return {
            "peft_type": "LORA",
            "base_model_name_or_path": self._config.checkpoint.init_from,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "bias": "none",
            "fan_in_fan_out": any(not isinstance(v, nn.Linear) for v in self._layers.values()),
            "target_modules": sorted(self._layers),
            "modules_to_save": sorted(whole) or None,
            "inference_mode": True,
            "task_type": None,
        }

    def _origin(self) -> dict[str, Any]:
        found = Manifest.read(self._checkpoint)
        return {
            "run": self._checkpoint.parents[1].name,
            "step": found.step,
            "checkpoint": WeightFiles(self._checkpoint, None).digest(),
            "base": found.base or None,
            "merged": self._merge,
            "model": self._config.model,
            "hpctrain": __version__,
        }


def _skeleton(config: Config) -> nn.Module:
    """Return the model on the meta device, or on the CPU if it cannot be built there."""
    try:
        with torch.device("meta"):
            return make("model", config.model)  # type: ignore[no-any-return]
    except Exception:  # the constructor reads a value; what is wrong with it is raised below
        return make("model", config.model)  # type: ignore[no-any-return]


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
    sync(path)
