"""What is known of a model without memory: parameters, FLOPs, and sizes of its products.

A linear layer multiplies each token, a convolution each position of its output, and one of E
experts, of which a token uses k, k / E of the tokens. Blocks that the pass leaves out because they
are alike have the positions of the one that is there.
"""

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from hpctrain.base.errors import ConfigError, HpctrainError
from hpctrain.base.processes import frames
from hpctrain.config.schema import Config
from hpctrain.data.shards.types import Batch
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.layers.lora import adapted
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.parallel.precision import float8_layers
from hpctrain.engine.parallel.preparing.activation_checkpointing import checkpoint_activations
from hpctrain.engine.parallel.preparing.blocks import find_blocks
from hpctrain.engine.parallel.preparing.summary import ModelSummary
from hpctrain.engine.parallel.preparing.whole_model import check_layers, freeze, with_adapters
from hpctrain.engine.parallel.setup import Build
from hpctrain.insight.flops.flops import Flops, count_flops, meta_batch
from hpctrain.insight.flops.identical_blocks import alike

# The positions of a sample that pass a layer, and the elements that a convolution moves.
_Passed = dict[nn.Module, tuple[float, float]]


@dataclass(frozen=True)
class Matrix:
    """A weight, or several of one size, each with its own positions."""

    rows: int
    columns: int
    positions: float  # of a sample, which are multiplied by it
    number: int = 1  # of equal weights: the experts of a layer, the groups of a convolution
    fp8: bool = False  # whether precision.compute=fp8 computes it so
    moved: float = 0.0  # elements of a sample that a convolution reads and writes; 0 for others
    channels_last: bool = True  # otherwise cuDNN turns them around for products in 16 bits

    @property
    def flops(self) -> float:
        """The operations of the forward pass of a sample."""
        return 2.0 * self.rows * self.columns * self.positions * self.number


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a model."""

    parameters: int  # each once
    trainable: int
    embedding: int  # in tables of which rows are looked up
    active: int  # that a token uses: without its unused experts
    flops: Flops | None  # of a sample; None if they can be neither counted nor computed
    matrices: tuple[Matrix, ...]  # of the linear layers, convolutions and experts
    width: int  # elements of a position between two blocks; 0 if unknown
    keys_values: int = 0  # elements of the keys and values of a position in a block
    experts: int = 0  # of a layer; 0 if there are none
    of_experts: int = 0  # parameters of all experts
    per_token: int = 0  # experts that a token uses
    adapted: int = 0  # frozen parameters that have an adapter, which may be held in 4 bits
    context: bool = False  # its sequences can be divided (context parallel)
    again: int = 0  # operations of a sample that full activation checkpointing adds
    blocks: int = 0  # 0 if they cannot be found

    @property
    def tokens(self) -> int:
        """The tokens of a sample; 0 if its samples have none."""
        return self.flops.tokens if self.flops else 0


def build_of(training: Config) -> Build:
    """Return a function that makes the model as it is trained, with adapters and what is frozen."""
    section, lora = training.model, training.train.lora

    def build() -> nn.Module:
        model: nn.Module = instantiate("model", section)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model._target_={section.get('_target_')}: it makes a {type(model).__name__}, not "
                "a torch.nn.Module"
            )
        check_layers(model)
        whole, blocks = with_adapters(model, lora), training.parallel.blocks
        freeze(whole, training.optimizer, blocks, lora)
        return model

    return build


def build_on_meta(build: Build) -> nn.Module:
    """Return a model without memory; a ConfigError has the call that fails."""
    try:
        with torch.device("meta"):
            return build()
    except HpctrainError as error:
        missing = isinstance(error.__cause__, ImportError)
        if missing or not str(error).startswith("model._target_"):
            raise
        how = "plan builds the model without memory, on torch's meta device, where values cannot"
        raise ConfigError(f"{error}\n{how} be read") from error


def blocks_of(model: nn.Module, classes: Sequence[str], *, needed: bool = False) -> list[nn.Module]:
    """Return the blocks, which `parallel.blocks` may name; none if they are not found or needed."""
    try:
        return [block for _, block in find_blocks(model, [*classes])]
    except ConfigError:
        if needed:
            raise
        return []


def facts_of(model: nn.Module, task: Any, sample: Batch, classes: Sequence[str] = ()) -> ModelFacts:
    """Return the facts of a model; a ConfigError if the task and the sample do not fit."""
    summary = ModelSummary.of(model)
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    experts = [found for module in model.modules() if (found := _experts(module))]
    blocks, plan = blocks_of(model, classes), getattr(model, "plan", None)
    # The width of the residual stream is the length of the vectors of the first block.
    vectors = [p.numel() for block in blocks[:1] for p in block.parameters() if p.ndim == 1]
    width, numbers = next(iter(vectors), 0), plan.numbers if isinstance(plan, Plan) else {}
    heads, batch = numbers.get("heads", 1), meta_batch(sample)
    with _noted_positions(model, len(batch["mask"])) as seen:
        flops = count_flops(model, task, batch)
    again = _again(model, task, batch, flops, blocks) if flops and blocks else 0
    in_fp8: list[str] = []
    with contextlib.suppress(ConfigError):  # no layer can compute in it
        in_fp8 = float8_layers(model, [])
    return ModelFacts(
        parameters=summary.parameters,
        trainable=summary.trained,
        embedding=sum(table.numel() for table in tables.values()),
        active=summary.parameters - sum(held // n * (n - used) for n, used, held in experts),
        flops=flops,
        matrices=_matrices_of(model, seen, flops.tokens if flops else 1, in_fp8),
        width=width,
        keys_values=2 * width * numbers.get("kv_heads", heads) // heads,
        experts=min((n for n, _, _ in experts), default=0),
        of_experts=sum(held for _, _, held in experts),
        per_token=max((used for _, used, _ in experts), default=0),
        adapted=sum(w.numel() for w in frozen_weights(model)),
        context=isinstance(plan, Plan) and plan.context,
        again=again,
        blocks=len(blocks),
    )


@contextlib.contextmanager
def _noted_positions(model: nn.Module, samples: int) -> Iterator[_Passed]:
    """Note what passes the layers in a call of the model with so many samples."""
    seen: _Passed = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.ndim > 1:
            size, convolves = output.numel() / samples, isinstance(module, _ConvNd)
            moved = args[0].numel() / samples + size if convolves else 0.0
            seen[module] = size / output.shape[1 if convolves else -1], moved

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_hook(note).remove)
        yield seen


def _matrices_of(
    model: nn.Module, seen: _Passed, otherwise: int, fp8: Collection[str]
) -> tuple[Matrix, ...]:
    """Return the weights, each once; `fp8` are the names of layers that can compute in it.

    `otherwise` are the positions of layers that were not called.
    """
    found, known = [], set()
    groups = [[model.get_submodule(name) for name in names] for names in alike(model)]
    called = {  # a layer of a block that was left out, and that of the first block
        part: first
        for first_block, *others in groups
        for block in others
        for part, first in zip(block.modules(), first_block.modules(), strict=True)
    }
    convolutions = [m for m in model.modules() if isinstance(m, _ConvNd)]
    channels_last = any(not layer.weight.is_contiguous() for layer in convolutions)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        first = module if module in seen else called.get(module, module)
        positions, moved = seen.get(first, (float(otherwise), 0.0))
        for weight in module.parameters(recurse=False):
            if weight.ndim < 2 or id(weight) in known:
                continue
            known.add(id(weight))
            rows, *others = weight.shape
            number, last, each = 1, True, positions
            if isinstance(module, _ConvNd):
                number, last = module.groups, channels_last
                rows //= number
            elif weight.ndim == 3:  # of experts
                number, rows, *others = weight.shape
                each = positions / number
            columns, in_fp8 = math.prod(others), name in fp8
            found.append(Matrix(rows, columns, each, number, in_fp8, moved, last))
    return tuple(found)


def _again(
    model: nn.Module, task: Any, batch: Batch, flops: Flops, blocks: Sequence[nn.Module]
) -> int:
    """Return the operations that full checkpointing adds: not the last product of a block."""
    checkpoint_activations(blocks, "full")
    try:
        counted = count_flops(model, task, batch)
    finally:
        for block in blocks:
            del block.forward
    return max(0, counted.training - flops.training) if counted else 0


@contextlib.contextmanager
def explained(what: str, others: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise a ConfigError with the line that fails in place of an error within, but of `others`."""
    try:
        yield
    except HpctrainError:
        raise
    except others:
        raise
    except Exception as error:
        stack = frames.of_error(error)
        stack = [each for each in stack if each[0].f_globals.get("__package__") != __package__]
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        place = f"{what} fails at {frames.place(stack)}"
        raise ConfigError(f"{place}\n{type(error).__name__}: {reason}") from error


def frozen_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the frozen parameters that have an adapter, which may be held in 4 bits."""
    layers: list[Any] = [layer for _, layer in adapted(model)]
    return [layer.weight for layer in layers if not layer.weight.requires_grad]


def _experts(module: nn.Module) -> tuple[int, int, int] | None:
    """Return the experts of a layer, those that a token uses, and the parameters of all."""
    bank, experts = getattr(module, "bank", None), getattr(module, "experts", None)
    used = getattr(module, "per_token", None)
    if isinstance(bank, nn.Module) and isinstance(experts, int) and isinstance(used, int):
        return experts, used, sum(p.numel() for p in bank.parameters())
    return None
