"""The memory of the rank that needs most, by part.

    states (formulas) + activations (measured) x micro-batches in flight + allowance = total

With a pipeline, the first stage keeps the activations of most micro-batches, and the last one has
the logits: both are computed, and the larger counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import ParallelConfig
from hpctrain.config.schema.parallel import SCHEDULES
from hpctrain.errors import ConfigError
from hpctrain.estimates.optimizer_states import optimizer_states
from hpctrain.hardware import Hardware
from hpctrain.models.plan import Plan
from hpctrain.parallel.dividing.chosen_plan import find_plan, matching
from hpctrain.parallel.dividing.stages import block_counts, numbers_of
from hpctrain.parallel.dividing.tensor import sequence_is_divided
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.plan.inspecting.activations import Activations
from hpctrain.plan.inspecting.model_facts import ModelFacts
from hpctrain.plan.layouts import Layout
from hpctrain.plan.memory import computed_bytes, memory_of, shards, stored_bytes
from hpctrain.plan.model_sizes import ModelSizes
from hpctrain.units import GIB

# Of a GPU's memory: the CUDA context, NCCL's buffers, and what the allocator loses in gaps.
CONTEXT_BYTES = GIB
GAPS = 0.04


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the rank that needs most; `hpctrain.plan.memory.Memory` explains the first ones."""

    parameters: int  # that the optimizer updates
    gradients: int
    optimizer: int
    gathered: int  # put together or converted for computing
    activations: int | None  # of all micro-batches in flight; None if unknown
    logits: int | None  # the outputs of the model, and what the loss adds to them; None if unknown
    buffers: int  # gradients before their reduction, and buffers of communication
    allowance: int  # what the context of CUDA takes, and gaps; 0 on CPUs
    # The largest sum of a step: not all exists at once. A lower bound without activations.
    total: int
    host: int = 0  # what offload keeps in the memory of the node instead of the GPU's


# The shapes of all parameters that a rank has, and of those that are trained.
_Sizes = tuple[ModelSizes, ModelSizes]


class MemoryModel:
    """Computes the memory of layouts of one model, which is on the meta device.

    The activations are those of a sample, by `train.activation_checkpointing`.
    """

    def __init__(
        self, model: nn.Module, facts: ModelFacts, activations: Mapping[str, Activations]
    ) -> None:
        self._model, self._facts, self._activations = model, facts, activations
        self._sizes: dict[tuple[int, int, int, str, bool], list[_Sizes]] = {}
        self._gathered: dict[int, int] = {}
        self._blocks = 0
        with contextlib.suppress(ConfigError):
            self._blocks = len(find_blocks(model, []))

    def of(self, layout: Layout, hardware: Hardware | None) -> RankMemory:
        """Return the memory of a layout; a ConfigError if the model cannot be divided so."""
        stages = self._stages(layout)
        for sizes, _ in stages:
            _check_experts(sizes, layout.config.parallel, layout.degrees)
        fullest = max(
            (self._stage(layout, hardware, both, i) for i, both in enumerate(stages)),
            key=lambda memory: memory.total,
        )
        if not layout.config.parallel.fsdp.offload:
            return fullest
        return replace(fullest, host=max(_on_host(layout, *both) for both in stages))

    def _stage(
        self, layout: Layout, hardware: Hardware | None, both: _Sizes, stage: int
    ) -> RankMemory:
        config, degrees, batch = layout.config, layout.degrees, layout.batch
        (sizes, trained), parallel = both, config.parallel
        states = memory_of(
            *(sizes, degrees, parallel, config.precision, config.optimizer, batch.accumulate),
            trained,
        )
        blocks, logits = self._kept(layout)
        of_stage = len(sizes.blocks) / max(1, self._blocks) if degrees.pp > 1 else 1
        last = stage == degrees.pp - 1
        flying = _in_flight(layout, stage)
        kept = int(blocks * of_stage * batch.micro * flying)
        of_loss = int(logits * batch.micro * flying) if last else 0
        measured = self._activations[config.train.activation_checkpointing]
        working = measured.working // (degrees.cp * degrees.tp)
        if degrees.cp > 1 and config.train.activation_checkpointing != "none":
            working += self._gathered_keys(layout) // max(1, self._blocks)
        own = measured.saved // max(1, self._blocks) // (degrees.cp * degrees.tp)
        most = kept + of_loss
        if degrees.pp > 1:  # blocks are computed again while the copies of all are there
            most = max(most, kept + working * batch.micro)
        peak = states.peak_with(most, (working + own) * batch.micro)
        on_gpu = hardware is not None and hardware.memory_bytes is not None
        on_gpu = on_gpu and parallel.device != "cpu"
        allowance = CONTEXT_BYTES + int(GAPS * peak) if on_gpu else 0
        return RankMemory(
            *(states.parameters, states.gradients, states.optimizer, states.gathered),
            kept if measured.exact else None,
            of_loss if measured.exact else None,
            states.buffers,
            allowance,
            peak + allowance,
        )

    def _kept(self, layout: Layout) -> tuple[int, int]:
        """Return the bytes of a sample on a rank: what blocks keep, and logits with the loss."""
        config, degrees = layout.config, layout.degrees
        measured = self._activations[config.train.activation_checkpointing]
        blocks, logits = measured.kept - measured.outside, measured.outside
        if degrees.tp > 1:
            whole = blocks // degrees.cp
            blocks = whole // degrees.tp
            # What layers get is put together from all ranks, and kept so for the backward pass.
            if config.train.activation_checkpointing != "full":
                whole_inputs = self._whole_inputs(layout) // degrees.cp
                blocks += whole_inputs * (degrees.tp - 1) // degrees.tp
            divided = config.parallel.loss_parallel
            return blocks, logits // degrees.cp // (degrees.tp if divided else 1)
        blocks //= degrees.cp
        if degrees.cp > 1 and config.train.activation_checkpointing == "none":
            blocks += self._gathered_keys(layout)
        return blocks, logits // degrees.cp

    def _gathered_keys(self, layout: Layout) -> int:
        """Return the bytes of a sample by which gathered keys and values exceed a rank's own.

        Each block keeps them whole instead of its own part: 2 (1 - 1 / cp) of a sequence.
        """
        degrees = layout.degrees
        plan = getattr(self._model, "plan", None)
        numbers = plan.numbers if isinstance(plan, Plan) else {}
        heads = numbers.get("heads", 1)
        width = self._facts.width * numbers.get("kv_heads", heads) // heads // degrees.tp
        size = computed_bytes(layout.config.precision)
        return int(2 * (1 - 1 / degrees.cp) * self._facts.tokens * width * size * self._blocks)

    def _whole_inputs(self, layout: Layout) -> int:
        """Return the bytes of a sample of all inputs that tensor parallel puts together."""
        parallel, key = layout.config.parallel, layout.degrees.tp
        if key not in self._gathered:
            plan = find_plan(self._model, parallel, layout.degrees)
            styles = [s for p, s in plan.tensor.items() for _ in matching(self._model, p)]
            number = sum(style == "gather_sequence" for style in styles)
            if not sequence_is_divided(plan, parallel):
                number *= 3  # norms and residuals are whole, too
            size = computed_bytes(layout.config.precision)
            self._gathered[key] = number * self._facts.tokens * self._facts.width * size
        return self._gathered[key]

    def _stages(self, layout: Layout) -> list[_Sizes]:
        """Return the shapes that each rank of a pipeline has."""
        parallel, degrees = layout.config.parallel, layout.degrees
        divided = degrees.ranks > degrees.dp_replicate
        key = (degrees.tp, degrees.pp, parallel.ep, parallel.pipeline.schedule, divided)
        if key not in self._sizes:
            wholes, learnt = (self._divided(parallel, degrees, each) for each in (False, True))
            self._sizes[key] = list(zip(wholes, learnt, strict=True))
        return self._sizes[key]

    def _divided(
        self, parallel: ParallelConfig, degrees: Degrees, trained: bool
    ) -> list[ModelSizes]:
        model, plan = self._model, None
        if degrees.ranks > degrees.dp or parallel.ep > 1:
            plan = find_plan(model, parallel, degrees)
        styles, experts = (dict(plan.tensor), plan.experts) if plan else ({}, "")
        blocks = self._named_blocks(parallel, degrees)
        whole = ModelSizes.of(
            *(model, blocks, styles, degrees.tp), experts=experts, ep=parallel.ep, trained=trained
        )
        if degrees.pp == 1 or plan is None:
            return [whole]
        counts = block_counts(model, plan, parallel, degrees.pp)
        first, last = (
            _outside(model, names, styles, degrees.tp, trained) for names in (plan.first, plan.last)
        )
        stages = []
        for rank in range(degrees.pp):
            numbers = numbers_of(parallel.pipeline.schedule, degrees.pp, rank)
            parts = [slice(sum(counts[:n]), sum(counts[: n + 1])) for n in numbers]
            rest = (first if 0 in numbers else ()) + (last if len(counts) - 1 in numbers else ())
            stages.append(
                ModelSizes(
                    tuple(block for part in parts for block in whole.blocks[part]),
                    rest or ((0,),),
                    tuple(held for part in parts for held in whole.experts[part]),
                    whole.ep,
                )
            )
        return stages

    def _named_blocks(self, parallel: ParallelConfig, degrees: Degrees) -> list[nn.Module]:
        try:
            return [block for _, block in find_blocks(self._model, parallel.blocks)]
        except ConfigError:
            if degrees.ranks > degrees.dp_replicate:  # what is divided is divided by blocks
                raise
            return []


def _on_host(layout: Layout, sizes: ModelSizes, trained: ModelSizes) -> int:
    """Return the bytes that a rank offloads: parameters and gradients, both pinned, and states."""
    config = layout.config
    ranks, stored = shards(layout.degrees, config.parallel), stored_bytes(config.precision)
    state = optimizer_states(config.optimizer) * stored * trained.part(ranks)
    if config.parallel.device == "cpu":
        return stored * (sizes.part(ranks) + trained.part(ranks)) + state
    return sizes.pinned(ranks, stored) + trained.pinned(ranks, stored) + state


def _check_experts(sizes: ModelSizes, parallel: ParallelConfig, degrees: Degrees) -> None:
    """Raise the ConfigError of a training whose ranks cannot divide the same experts."""
    ranks = shards(degrees, parallel) // parallel.ep if degrees.dp_shard > 1 else 1
    for number, width, *_ in {shape for held in sizes.experts for shape in held}:
        if number % ranks and width % ranks:
            raise ConfigError(
                f"parallel.ep={parallel.ep} leaves {number} experts for {ranks} ranks, which "
                f"divide neither these nor their width {width}"
            )


def _outside(
    model: nn.Module, names: Sequence[str], styles: dict[str, str], tp: int, trained: bool
) -> tuple[tuple[int, ...], ...]:
    modules = nn.ModuleDict({name.replace(".", "-"): model.get_submodule(name) for name in names})
    inner = {name.replace(".", "-"): styles[name] for name in names if name in styles}
    return ModelSizes.of(modules, [], inner, tp, trained=trained).rest


def _in_flight(layout: Layout, stage: int) -> float:
    """Return how many micro-batches a stage has made forward, but not backward."""
    pp, parts = layout.degrees.pp, layout.batch.accumulate
    schedule = layout.config.parallel.pipeline.schedule
    if pp == 1:
        return 1
    if schedule == "gpipe":
        return parts
    if schedule == "1f1b":
        return min(parts, pp - stage)
    of_rank = SCHEDULES[schedule]
    if schedule == "interleaved":  # Narayanan et al. 2021: 2 (p - stage - 1) + (v - 1) p + 1 chunks
        return min(parts, (2 * (pp - stage - 1) + (of_rank - 1) * pp + 1) / of_rank)
    return min(parts, pp)
