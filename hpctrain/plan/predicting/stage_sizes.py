"""The shapes of the parameters that a layout leaves to each rank of a pipeline."""

from collections.abc import Sequence

import torch
from torch import nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import ParallelConfig
from hpctrain.errors import ConfigError
from hpctrain.models.plan import Plan
from hpctrain.parallel.dividing.chosen_plan import find_plan, matching
from hpctrain.parallel.dividing.stages import block_counts, numbers_of
from hpctrain.parallel.preparing.blocks import find_blocks
from hpctrain.plan.inspecting.model_facts import blocks_of, frozen_weights
from hpctrain.plan.layouts import Layout
from hpctrain.plan.memory import shards
from hpctrain.plan.model_sizes import ModelSizes

# The shapes of all parameters that a rank has, and of those that are trained.
Sizes = tuple[ModelSizes, ModelSizes]


class StageSizes:
    """The shapes of one model, which is on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._frozen = model, frozen_weights(model)
        self._sizes: dict[tuple[int, int, int, str, bool], list[Sizes]] = {}
        self._plans: dict[int, tuple[Plan, int]] = {}

    def of(self, layout: Layout) -> list[Sizes]:
        """Return the shapes that each rank of a pipeline has; a ConfigError if it cannot."""
        parallel, degrees = layout.config.parallel, layout.degrees
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
        model, plan = self._model, None
        if degrees.ranks > degrees.dp or parallel.ep > 1:
            plan = find_plan(model, parallel, degrees)
        if degrees.ranks > degrees.dp_replicate:  # what is divided is divided by blocks
            blocks = [block for _, block in find_blocks(model, parallel.blocks)]
        else:
            blocks = blocks_of(model, parallel.blocks)
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
        return self._frozen if layout.config.train.lora.quantize else []

    def plan(self, layout: Layout) -> tuple[Plan, int]:
        """Return how layers can be divided, and how many get an input that is put together."""
        key = layout.degrees.tp
        if key not in self._plans:
            plan = find_plan(self._model, layout.config.parallel, layout.degrees)
            gathered = [name for name, style in plan.tensor.items() if style == "gather_sequence"]
            self._plans[key] = plan, sum(len(matching(self._model, each)) for each in gathered)
        return self._plans[key]


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
