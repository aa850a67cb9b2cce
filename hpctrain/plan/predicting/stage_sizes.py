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
from hpctrain.plan.inspecting.model_facts import frozen_weights
from hpctrain.plan.layouts import Layout
from hpctrain.plan.memory import shards
from hpctrain.plan.model_sizes import ModelSizes

# The shapes of all parameters that a rank has, and of those that are trained.
Sizes = tuple[ModelSizes, ModelSizes]


class StageSizes:
    """The shapes of one model, which is on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sizes: dict[tuple[int, int, int, str, bool], list[Sizes]] = {}
        self._plans: dict[int, Plan] = {}
        self._gathers: dict[int, int] = {}

    def of(self, layout: Layout) -> list[Sizes]:
        """Return the shapes that each rank of a pipeline has; a ConfigError if it cannot."""
        parallel, degrees = layout.config.parallel, layout.degrees
        divided = degrees.ranks > degrees.dp_replicate
        key = (degrees.tp, degrees.pp, parallel.ep, parallel.pipeline.schedule, divided)
        if key not in self._sizes:
            packed = self.packed(layout)
            wholes, learnt = (
                self._divided(parallel, degrees, packed, trained=each) for each in (False, True)
            )
            self._sizes[key] = list(zip(wholes, learnt, strict=True))
        for sizes, _ in self._sizes[key]:
            _check_experts(sizes, parallel, degrees)
        return self._sizes[key]

    def _divided(
        self,
        parallel: ParallelConfig,
        degrees: Degrees,
        packed: list[torch.Tensor],
        *,
        trained: bool,
    ) -> list[ModelSizes]:
        model, plan = self._model, None
        if degrees.ranks > degrees.dp or parallel.ep > 1:
            plan = find_plan(model, parallel, degrees)
        styles, experts = (dict(plan.tensor), plan.experts) if plan else ({}, "")
        blocks = self._named_blocks(parallel, degrees)
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

    def packed(self, layout: Layout) -> list[torch.Tensor]:
        """Return the weights that are held in 4 bits."""
        return frozen_weights(self._model) if layout.config.train.lora.quantize else []

    def gathers(self, layout: Layout) -> int:
        """Return how many layers get an input that tensor parallel puts together."""
        key = layout.degrees.tp
        if key not in self._gathers:
            styles = self.plan(layout).tensor.items()
            patterns = [pattern for pattern, style in styles if style == "gather_sequence"]
            self._gathers[key] = sum(len(matching(self._model, each)) for each in patterns)
        return self._gathers[key]

    def plan(self, layout: Layout) -> Plan:
        """Return how the model says that its layers can be divided."""
        key = layout.degrees.tp
        if key not in self._plans:
            self._plans[key] = find_plan(self._model, layout.config.parallel, layout.degrees)
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
