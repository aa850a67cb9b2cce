"""A layout: how a training is spread over ranks, and the overrides that say so.

Layouts keep the global batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, TrainConfig
from hpctrain.config.validate import validate
from hpctrain.insight.plan.inspecting.model_facts import ModelFacts

_DEGREES = tuple(Degrees.__dataclass_fields__)
_MOST_PARTS = 4096  # micro-batches of a share


@dataclass(frozen=True)
class Layout:
    """A training on its ranks."""

    training: Config  # with the degrees and batch sizes of the layout
    nodes: int
    overrides: tuple[str, ...]  # what to add to the command line
    named: bool = False  # whether it is the layout of the command line

    @property
    def ranks(self) -> int:
        """The ranks of the job."""
        return self.nodes * self.training.launch.tasks_per_node

    @property
    def allocated(self) -> int:
        """The ranks that the job would have with its spare nodes, which are paid for, too."""
        launch = self.training.launch
        return (self.nodes + launch.spares) * launch.tasks_per_node

    @cached_property
    def degrees(self) -> Degrees:
        """The degrees of parallelism."""
        return Degrees.of(self.training.parallel, self.ranks)

    @cached_property
    def batch(self) -> BatchSizes:
        """The sizes of the batch and its parts."""
        return BatchSizes.of(self.training.train, self.training.parallel, self.degrees)

    @property
    def divided(self) -> tuple[object, ...]:
        """What tells this layout from others of the same training."""
        return self.ranks, self.kind, self.batch, self.training.train.activation_checkpointing

    @cached_property
    def kind(self) -> str:
        """The name of what happens to the data-parallel ranks, such as zero3."""
        parallel = self.training.parallel
        degrees = vars(self.degrees) | {"ep": parallel.ep}
        return _kind(degrees, parallel.zero, parallel.fsdp.offload)

    @property
    def name(self) -> str:
        """The kind; two of one kind are on the same ranks only if one of them was given."""
        return self.kind + ", as given" * self.named

    @property
    def label(self) -> str:
        """The kind and the ranks: `zero3 on 8 ranks`."""
        return _label(self.kind, self.ranks)


def of_command_line(training: Config, nodes: int) -> Layout:
    """Return the layout of a training itself; a ConfigError if its degrees do not fit its ranks."""
    layout = Layout(training, nodes, (), named=True)
    validate(training, layout.ranks)
    return layout


def layouts(
    training: Config, nodes: int, per_node: int, facts: ModelFacts, excluded: dict[str, str]
) -> Iterator[list[Layout]]:
    """Yield the layouts of a number of ranks, by their degrees.

    Those of one list differ in micro-batches and activation checkpointing; the last one needs the
    least memory. `excluded` gets what is not possible, with the reason.
    """
    modes: Sequence[str] = ("none", "selective", "full") if facts.blocks else ("none",)
    for degrees in _degrees(nodes, per_node, facts):
        # torch cannot choose which results of experts to keep.
        possible = [mode for mode in modes if mode != "selective" or "ep" not in degrees]
        found = [
            _layout(training, nodes, per_node, degrees, mode, parts)
            for mode in possible
            for parts in _parts(training.train, degrees, nodes * per_node)
        ]
        try:
            validate(found[0].training, found[0].ranks)
        except ConfigError as error:
            # It is named as it was asked for, also where a degree that takes what is left is 1.
            kind = _kind(degrees, degrees.get("zero", 0), "offload" in degrees)
            excluded[_label(kind, found[0].ranks)] = str(error).splitlines()[0]
        else:
            yield found


def _degrees(nodes: int, per_node: int, facts: ModelFacts) -> Iterator[dict[str, int]]:
    """Yield the degrees that are worth a look; `offload` stands beside them."""
    ranks, whole = nodes * per_node, {"dp_replicate": 1, "dp_shard": -1}
    zero3 = whole | {"zero": 3}
    if ranks == 1:
        single = {"dp_replicate": 1, "dp_shard": 1}
        yield from (single, single | {"zero": 3, "offload": 1})
        return
    yield {"dp_replicate": -1, "dp_shard": 1}
    yield from (whole | {"zero": zero} for zero in (1, 2, 3))
    hybrid = {"dp_replicate": -1, "dp_shard": per_node, "zero": 3}
    if nodes > 1 and per_node > 1:
        yield hybrid
    inside = [tp for tp in (2, 4, 8) if tp <= per_node and per_node % tp == 0]
    for tp in inside:
        yield zero3 | {"tp": tp}
        if nodes > 1:
            yield hybrid | {"dp_shard": per_node // tp, "tp": tp}
    tokens = facts.tokens if facts.context else 0
    cps = [cp for cp in (2, 4, 8) if ranks % cp == 0 and tokens and tokens % (2 * cp) == 0]
    eps = [ep for ep in (2, 4, 8, 16, 32, 64) if facts.experts and facts.experts % ep == 0]
    eps = [ep for ep in eps if ranks % ep == 0]
    narrow = inside[:-1][-1:]  # tensor parallel that leaves room for another dimension in a node
    for pp in (pp for pp in (2, 4, 8, 16) if nodes >= pp and nodes % pp == 0):
        within = [cp for cp in cps if ranks % (pp * cp) == 0]
        near = [ep for ep in eps if ep <= per_node]
        others = [{}, *({"tp": tp} for tp in inside[-1:]), *({"cp": cp} for cp in within)]
        if 2 in within:
            others += [{"cp": 2, "tp": tp} for tp in narrow]
            others += [{"cp": 2, "ep": ep} for ep in near[-1:]]
        others += [{"ep": ep} for ep in near]
        yield from (whole | {"zero": 1, "pp": pp} | more for more in others)
        for more in others[: 1 + bool(inside)]:
            if ranks > pp * more.get("tp", 1):
                yield zero3 | {"pp": pp} | more
    yield from (zero3 | {"cp": cp} for cp in cps)
    yield from (zero3 | {"ep": ep} for ep in eps)
    yield from (zero3 | {"cp": cp, "ep": ep} for cp in cps[:1] for ep in eps[-1:])
    yield from (zero3 | {"cp": cp, "tp": tp} for cp in cps[:1] for tp in narrow)
    yield zero3 | {"offload": 1}


def _kind(degrees: Mapping[str, int], zero: int, offload: bool) -> str:
    """Return the name of degrees, of which -1 is what the others leave."""
    replicated, divided = (degrees[name] != 1 for name in ("dp_replicate", "dp_shard"))
    name = "hsdp" if replicated and divided else f"zero{zero}" if divided else "ddp" * replicated
    others = [f"{n}{d}" for n in ("cp", "tp", "pp", "ep") if (d := degrees.get(n, 1)) > 1]
    return "+".join(part for part in (name, *others, "offload" * offload) if part) or "single"


def _label(kind: str, ranks: int) -> str:
    return f"{kind} on {ranks} rank{'s' * (ranks > 1)}"


def _parts(train: TrainConfig, degrees: dict[str, int], ranks: int) -> list[int]:
    """Return the numbers of micro-batches that divide a share of the global batch."""
    dp = max(1, ranks // math.prod(degrees.get(name, 1) for name in ("tp", "pp", "cp")))
    share, rest = divmod(train.global_batch_size, dp)
    least = degrees.get("pp", 1)  # each stage of a pipeline has one
    numbers = range(least, 1 if rest else min(share, _MOST_PARTS) + 1)
    return [n for n in numbers if share % n == 0] or [1]


def _layout(
    training: Config, nodes: int, per_node: int, degrees: dict[str, int], mode: str, parts: int
) -> Layout:
    sizes: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "weights": None} | degrees
    fsdp = replace(training.parallel.fsdp, offload=bool(sizes.pop("offload", False)))
    parallel = replace(training.parallel, fsdp=fsdp, **sizes)
    batch: dict[str, Any] = {"accumulate": parts, "micro_batch_size": None}
    train = replace(training.train, activation_checkpointing=mode, **batch)
    launch = replace(training.launch, nodes=nodes, tasks_per_node=per_node)
    if launch.gpus_per_node or training.hardware.get("devices"):  # they go with the ranks
        launch.gpus_per_node = per_node
    changed = replace(training, parallel=parallel, train=train, launch=launch)
    return Layout(changed, nodes, _differences(training, changed))


def _differences(training: Config, changed: Config) -> tuple[str, ...]:
    """Return the overrides that make the second training of the first."""
    names = (
        *("launch.nodes", "launch.tasks_per_node", "launch.gpus_per_node"),
        *(f"parallel.{name}" for name in (*_DEGREES, "zero", "ep", "weights")),
        *("parallel.fsdp.offload", "train.micro_batch_size", "train.accumulate"),
        "train.activation_checkpointing",
    )
    found = []
    for name in names:
        before, after = attrgetter(name)(training), attrgetter(name)(changed)
        if before != after or name in ("launch.nodes", "launch.tasks_per_node"):
            text = "null" if after is None else str(after).lower()
            found.append(f"{name}={text}")
    return tuple(found)
