"""The memory of the rank that needs most, by part.

    states (formulas) + activations (measured) x micro-batches in flight + allowance = total

With a pipeline, the first stage keeps the activations of most micro-batches, and the last one has
the logits: both are computed, and the larger counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError
from hpctrain.base.units import ELEMENT_BYTES
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import ParallelConfig
from hpctrain.config.schema.parallel import SCHEDULES
from hpctrain.engine.distributed.devices import CONTEXT_BYTES
from hpctrain.engine.layers.plan import Plan
from hpctrain.engine.parallel.dividing.chosen_plan import find_plan, matching
from hpctrain.engine.parallel.dividing.stages import block_counts, numbers_of
from hpctrain.engine.parallel.dividing.tensor import sequence_is_divided
from hpctrain.insight.estimates.hardware import Hardware
from hpctrain.insight.plan.inspecting.activations import Activations, MeasuredActivations
from hpctrain.insight.plan.inspecting.model_facts import ModelFacts, blocks_of, frozen_weights
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.memory import by_fsdp, memory_of
from hpctrain.insight.plan.model_sizes import ModelSizes

GAPS = 0.04  # of a GPU's memory: what the allocator loses
# The shapes of all parameters that a rank has, and of those that are trained.
Sizes = tuple[ModelSizes, ModelSizes]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the rank that needs most; `plan.memory.Memory` explains the first ones."""

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

    @property
    def tensors(self) -> int:
        """The total without the allowance, as torch counts the peak of its tensors."""
        return self.total - self.allowance


class MemoryModel:
    """Computes the memory of layouts of one model, which is on the meta device."""

    def __init__(
        self, model: nn.Module, facts: ModelFacts, activations: MeasuredActivations
    ) -> None:
        self._facts, self._activations = facts, activations
        self._stages, self._blocks = _StageSizes(model), max(1, facts.blocks)

    def of(self, layout: Layout, hardware: Hardware) -> RankMemory:
        """Return the memory of a layout; a ConfigError if the model cannot be divided so."""
        stages = self._stages.of(layout)
        of_stages = (self._stage(layout, hardware, both, i) for i, both in enumerate(stages))
        most = max(of_stages, key=lambda memory: memory.total)
        assert min(v for v in vars(most).values() if v is not None) >= 0, f"below 0: {most}"
        if not layout.training.parallel.fsdp.offload:
            return most
        return replace(most, host=max(_on_host(layout, *both) for both in stages))

    def _stage(self, layout: Layout, hardware: Hardware, both: Sizes, stage: int) -> RankMemory:
        training, degrees, batch = layout.training, layout.degrees, layout.batch
        (sizes, trained), parallel, cp = both, training.parallel, layout.degrees.cp
        states = memory_of(sizes, degrees, training, batch.accumulate, trained)
        if packed := [weight.numel() for weight in self._stages.packed(layout)]:
            unpacked = max(packed) * ELEMENT_BYTES[training.precision.compute]
            states = states.with_packed(sum(map(offered.quantized.packed_bytes, packed)), unpacked)
        of_stage = len(sizes.blocks) / self._blocks if degrees.pp > 1 else 1
        flying, measured = _in_flight(layout, stage), self._measured(layout)
        saved = int(self._saved(layout) * of_stage * batch.micro * flying)
        outputs = of_loss = 0
        if _last(layout) in numbers_of(parallel.pipeline.schedule, degrees.pp, stage):
            by_tp = degrees.tp if parallel.loss_parallel else 1
            outputs = measured.outputs * batch.micro // cp // by_tp
            of_loss = measured.of_loss(batch.micro / cp) // by_tp
            of_loss += int(measured.outside * batch.micro / cp / by_tp * (flying - 1))
        working = measured.working // (cp * degrees.tp)
        if cp > 1 and training.train.activation_checkpointing != "none":
            working += self._gathered_keys(layout) // self._blocks
        own = measured.saved // self._blocks // (cp * degrees.tp)
        received = held = 0
        if degrees.pp > 1:  # torch's stages hold their outputs until the backward pass has ended
            received, held = self._received(layout, stage), outputs
        # Blocks are computed, possibly again, while what all keep is there; the loss is before.
        most = saved + received + max(of_loss, working * batch.micro + held)
        kept = most - of_loss
        # Activations are there in full when the backward pass begins, and all gradients at its end.
        end = states.end + received + (working + own) * batch.micro
        peak = max(states.peak, states.base + states.begin + most, states.base + end)
        on_gpu = hardware.memory_bytes is not None and parallel.device != "cpu"
        allowance = CONTEXT_BYTES + int(GAPS * peak) if on_gpu else 0
        return RankMemory(
            *(states.parameters, states.gradients, states.optimizer, states.gathered),
            kept if measured.exact else None,
            of_loss if measured.exact else None,
            *(states.buffers, allowance, peak + allowance),
        )

    def _measured(self, layout: Layout) -> Activations:
        mode = layout.training.train.activation_checkpointing
        return self._activations.of(mode, cast=_casts(layout))

    def _saved(self, layout: Layout) -> int:
        """Return the bytes of a sample that the blocks of a rank keep until the backward pass."""
        cp, tp = layout.degrees.cp, layout.degrees.tp
        mode = layout.training.train.activation_checkpointing
        saved = self._measured(layout).saved // cp // tp
        # What layers get is put together from all ranks, and kept so for the backward pass.
        if tp > 1 and mode != "full":
            saved += self._whole_inputs(layout) // cp * (tp - 1) // tp
        return saved + (self._gathered_keys(layout) if cp > 1 and mode == "none" else 0)

    def _received(self, layout: Layout, stage: int) -> int:
        """Return the bytes of a pipeline's buffers: for input and gradient of each micro-batch."""
        degrees, schedule = layout.degrees, layout.training.parallel.pipeline.schedule
        numbers, last = numbers_of(schedule, degrees.pp, stage), _last(layout)
        buffers = sum((n > 0) + (n < last) for n in numbers)
        return buffers * layout.batch.share * self._residual(layout) // degrees.cp

    def _gathered_keys(self, layout: Layout) -> int:
        """Return the bytes of a sample by which gathered keys and values exceed a rank's own."""
        degrees, size = layout.degrees, ELEMENT_BYTES[layout.training.precision.compute]
        own = self._facts.tokens * self._facts.keys_values * size * self._blocks // degrees.tp
        return int((1 - 1 / degrees.cp) * own)

    def _residual(self, layout: Layout) -> int:
        """Return the bytes of a sample between two blocks, as tensor parallel divides them."""
        training, degrees = layout.training, layout.degrees
        precision = training.precision
        size = ELEMENT_BYTES[precision.compute if _casts(layout) else precision.params]
        whole = self._facts.tokens * self._facts.width * size
        if degrees.tp > 1 and sequence_is_divided(self._stages.plan(layout)[0], training.parallel):
            return whole // degrees.tp
        return whole

    def _whole_inputs(self, layout: Layout) -> int:
        """Return the bytes of a sample of all inputs that tensor parallel puts together."""
        plan, number = self._stages.plan(layout)
        if not sequence_is_divided(plan, layout.training.parallel):
            number *= 3  # norms and residuals are whole, too
        size = ELEMENT_BYTES[layout.training.precision.compute]
        return number * self._facts.tokens * self._facts.width * size


def _on_host(layout: Layout, sizes: ModelSizes, trained: ModelSizes) -> int:
    """Return the bytes that a rank offloads: parameters and gradients, both pinned, and states."""
    training, stored = layout.training, ELEMENT_BYTES[layout.training.precision.params]
    ranks = layout.degrees.shards(training.parallel)
    state = training.optimizer.states * stored * trained.part(ranks)
    if training.parallel.device == "cpu":
        return stored * (sizes.part(ranks) + trained.part(ranks)) + state
    return sizes.pinned(ranks, stored) + trained.pinned(ranks, stored) + state


def _casts(layout: Layout) -> bool:
    """Return whether parameters have the format of the computation before autocast sees them."""
    precision = layout.training.precision
    stored = ELEMENT_BYTES[precision.compute] == ELEMENT_BYTES[precision.params]
    return stored or by_fsdp(layout.degrees, layout.training.parallel)


def _last(layout: Layout) -> int:
    """Return the number of the last stage of a pipeline, which has the outputs of the model."""
    return layout.degrees.pp * SCHEDULES[layout.training.parallel.pipeline.schedule] - 1


def _in_flight(layout: Layout, stage: int) -> float:
    """Return how many micro-batches a stage has made forward, but not backward."""
    pp, parts = layout.degrees.pp, layout.batch.accumulate
    schedule = layout.training.parallel.pipeline.schedule
    of_rank = SCHEDULES[schedule]
    # Interleaved: Narayanan et al. 2021, 2 (p - stage - 1) + (v - 1) p + 1 chunks.
    chunks = (2 * (pp - stage - 1) + (of_rank - 1) * pp + 1) / of_rank
    most = {"gpipe": parts, "1f1b": pp - stage, "interleaved": chunks}
    return 1 if pp == 1 else min(parts, most.get(schedule, pp))


class _StageSizes:
    """The shapes of one model, which is on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._frozen = model, frozen_weights(model)
        self._sizes: dict[tuple[int, int, int, str, bool], list[Sizes]] = {}
        self._plans: dict[int, tuple[Plan, int]] = {}

    def of(self, layout: Layout) -> list[Sizes]:
        """Return the shapes that each rank of a pipeline has; a ConfigError if it cannot."""
        parallel, degrees = layout.training.parallel, layout.degrees
        divided = degrees.ranks > degrees.dp_replicate
        key = (degrees.tp, degrees.pp, parallel.ep, parallel.pipeline.schedule, divided)
        if key not in self._sizes:
            packed = self.packed(layout)
            both = (self._divided(parallel, degrees, packed, trained) for trained in (False, True))
            self._sizes[key] = list(zip(*both, strict=True))
        for sizes, _ in self._sizes[key]:
            _check_experts(sizes, parallel, degrees)
        return self._sizes[key]

    def _divided(
        self, parallel: ParallelConfig, degrees: Degrees, packed: list[torch.Tensor], trained: bool
    ) -> list[ModelSizes]:
        model, has_plan = self._model, degrees.ranks > degrees.dp or parallel.ep > 1
        plan = find_plan(model, parallel, degrees) if has_plan else None
        # What is divided is divided by blocks.
        needed = degrees.ranks > degrees.dp_replicate
        blocks = blocks_of(model, parallel.blocks, needed=needed)
        styles, experts = (dict(plan.tensor), plan.experts) if plan else ({}, "")
        whole = ModelSizes.of(
            *(model, blocks, styles, degrees.tp),
            experts=experts,
            ep=parallel.ep,
            trained=trained,
            without=packed,
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
            own, held = (
                tuple(each for part in parts for each in all_blocks[part])
                for all_blocks in (whole.blocks, whole.experts)
            )
            stages.append(ModelSizes(own, rest or ((0,),), held, whole.ep))
        return stages

    def packed(self, layout: Layout) -> list[torch.Tensor]:
        """Return the weights that are held in 4 bits."""
        return self._frozen if layout.training.train.lora.quantize else []

    def plan(self, layout: Layout) -> tuple[Plan, int]:
        """Return how layers can be divided, and how many get an input that is put together."""
        key = layout.degrees.tp
        if key not in self._plans:
            plan = find_plan(self._model, layout.training.parallel, layout.degrees)
            gathered = [name for name, style in plan.tensor.items() if style == "gather_sequence"]
            self._plans[key] = plan, sum(len(matching(self._model, each)) for each in gathered)
        return self._plans[key]


def _check_experts(sizes: ModelSizes, parallel: ParallelConfig, degrees: Degrees) -> None:
    """Raise the ConfigError of a training whose ranks cannot divide the same experts."""
    ranks = degrees.shards(parallel) // parallel.ep if degrees.dp_shard > 1 else 1
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
