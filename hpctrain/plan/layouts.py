"""A layout: how a config is spread over ranks, and the overrides that say so.

Layouts keep the global batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError

_MOST_PARTS = 4096  # micro-batches of a share


@dataclass(frozen=True)
class Layout:
    """A config on its ranks."""

    config: Config  # with the degrees and batch sizes of the layout
    nodes: int
    overrides: tuple[str, ...]  # what to add to the command line
    named: bool = False  # whether it is the layout of the command line

    @property
    def ranks(self) -> int:
        """The ranks of the job."""
        return self.nodes * self.config.launch.tasks_per_node

    @property
    def allocated(self) -> int:
        """The ranks that the job would have with its spare nodes, which are paid for, too."""
        return (self.nodes + self.config.launch.spares) * self.config.launch.tasks_per_node

    @property
    def degrees(self) -> Degrees:
        """The degrees of parallelism."""
        return Degrees.of(self.config.parallel, self.ranks)

    @property
    def batch(self) -> BatchSizes:
        """The sizes of the batch and its parts."""
        return BatchSizes.of(self.config, self.degrees)

    @property
    def kind(self) -> str:
        """The name of what happens to the data-parallel ranks, such as zero3."""
        degrees, parallel = self.degrees, self.config.parallel
        if degrees.dp_shard > 1:
            name = "hsdp" if degrees.dp_replicate > 1 else f"zero{parallel.zero}"
        else:
            name = "ddp" if degrees.dp_replicate > 1 else ""
        others = [f"{n}{d}" for n in ("cp", "tp", "pp") if (d := getattr(degrees, n)) > 1]
        others += [f"ep{parallel.ep}"] if parallel.ep > 1 else []
        others += ["offload"] if parallel.fsdp.offload else []
        return "+".join(part for part in (name, *others) if part) or "single"

    @property
    def name(self) -> str:
        """The kind; two of one kind are on the same ranks only if one of them was given."""
        return self.kind + ", as given" * self.named


@dataclass(frozen=True)
class Divisible:
    """What can be divided of a model and its samples."""

    experts: int = 0  # of a layer; 0 if there are none
    positions: int = 0  # of a sample, for context parallel; 0 if it cannot

    def parts(self, cp: int) -> bool:
        """Return whether context parallel of `cp` ranks can divide the positions."""
        return self.positions > 0 and self.positions % (2 * cp) == 0


def of_command_line(config: Config, nodes: int) -> Layout:
    """Return the layout of a config itself; a ConfigError if its degrees do not fit its ranks."""
    layout = Layout(config, nodes, (), named=True)
    ranks = layout.ranks
    validate(config, ranks)
    return layout


def layouts(
    config: Config,
    nodes: int,
    per_node: int,
    modes: Sequence[str],
    excluded: dict[str, str],
    divisible: Divisible | None = None,
) -> Iterator[list[Layout]]:
    """Yield the layouts of a number of ranks, by their degrees.

    Those of one list differ in micro-batches and activation checkpointing; the last one needs the
    least memory.
    """
    ranks, divisible = nodes * per_node, divisible or Divisible()
    excluded |= _left_out(nodes, divisible)
    for name, degrees in _degrees(nodes, per_node, divisible).items():
        # torch cannot choose which results of experts to keep.
        possible = [mode for mode in modes if mode != "selective" or "ep" not in degrees]
        found = [
            _layout(config, nodes, per_node, degrees, mode, parts)
            for mode in possible
            for parts in _parts(config, degrees, ranks)
        ]
        try:
            validate(found[0].config, ranks)
        except ConfigError as error:
            label = f"{name} on {ranks} rank{'s' if ranks > 1 else ''}"
            excluded[label] = str(error).splitlines()[0]
        else:
            yield found


def _degrees(nodes: int, per_node: int, divisible: Divisible) -> dict[str, dict[str, int]]:
    """Return the degrees that are worth a look, by name; `offload` stands beside them."""
    ranks = nodes * per_node
    if ranks == 1:
        single = {"dp_replicate": 1, "dp_shard": 1}
        return {"single": single, "offload": single | {"zero": 3, "offload": 1}}
    found: dict[str, dict[str, int]] = {"ddp": {"dp_replicate": -1, "dp_shard": 1}}
    for zero in (1, 2, 3):
        found[f"zero{zero}"] = {"dp_replicate": 1, "dp_shard": -1, "zero": zero}
    zero3 = found["zero3"]
    if nodes > 1 and per_node > 1:
        found["hsdp"] = {"dp_replicate": -1, "dp_shard": per_node, "zero": 3}
    inside = [tp for tp in (2, 4, 8) if tp <= per_node and per_node % tp == 0]
    for tp in inside:
        found[f"zero3+tp{tp}"] = zero3 | {"tp": tp}
        if nodes > 1:
            kind = "hsdp" if per_node > tp else "ddp"
            found[f"{kind}+tp{tp}"] = {
                "dp_replicate": -1,
                "dp_shard": per_node // tp,
                "zero": 3,
                "tp": tp,
            }
    cps = [cp for cp in (2, 4, 8) if ranks % cp == 0 and divisible.parts(cp)]
    eps = [ep for ep in (2, 4, 8, 16, 32, 64) if divisible.experts and divisible.experts % ep == 0]
    eps = [ep for ep in eps if ranks % ep == 0]
    for pp in (2, 4, 8, 16):
        if nodes < pp or nodes % pp:
            continue
        whole = {"dp_replicate": 1, "dp_shard": -1, "pp": pp}
        within = [cp for cp in cps if ranks % (pp * cp) == 0]
        near = [ep for ep in eps if ep <= per_node]
        both = [{"cp": 2, "tp": tp} for tp in inside[:-1][-1:] if 2 in within]
        both += [{"cp": 2, "ep": ep} for ep in near[-1:] if 2 in within]
        others = [{}, *({"tp": tp} for tp in inside[-1:]), *({"cp": cp} for cp in within), *both]
        others += [{"ep": ep} for ep in near]
        for more in others:
            found["zero1" + _suffix({"pp": pp} | more)] = whole | {"zero": 1} | more
        for more in others[: 1 + bool(inside)]:
            if ranks > pp * more.get("tp", 1):
                found["zero3" + _suffix({"pp": pp} | more)] = whole | {"zero": 3} | more
    for cp in cps:
        found[f"zero3+cp{cp}"] = zero3 | {"cp": cp}
    for ep in eps:
        found[f"zero3+ep{ep}"] = zero3 | {"ep": ep}
    for cp, ep in zip(cps[:1], eps[-1:], strict=False):
        found[f"zero3+cp{cp}+ep{ep}"] = zero3 | {"cp": cp, "ep": ep}
    for cp, tp in zip(cps[:1], inside[:-1][-1:], strict=False):
        found[f"zero3+cp{cp}+tp{tp}"] = zero3 | {"cp": cp, "tp": tp}
    found["zero3+offload"] = zero3 | {"offload": 1}
    return found


def _suffix(degrees: dict[str, int]) -> str:
    return "".join(f"+{n}{degrees[n]}" for n in ("cp", "tp", "pp", "ep") if n in degrees)


def _left_out(nodes: int, divisible: Divisible) -> dict[str, str]:
    """Return the kinds of parallelism that no layout here has, with the reason."""
    reasons = {}
    if not divisible.experts:
        reasons["ep"] = "the model has no experts that could be divided"
    if not divisible.positions:
        reasons["cp"] = "the model cannot divide its sequences, or its samples have none"
    elif not divisible.parts(2):
        reasons["cp"] = f"{divisible.positions} positions are not divisible by 2 x cp"
    if nodes == 1:
        reasons["pp"] = (
            "a pipeline is looked at across nodes; inside one, tp needs no micro-batches"
        )
    return reasons


def _parts(config: Config, degrees: dict[str, int], ranks: int) -> list[int]:
    """Return the numbers of micro-batches that divide a share of the global batch."""
    dp = ranks // (degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1))
    share = config.train.global_batch_size // dp if dp else 0
    if dp == 0 or config.train.global_batch_size % dp:
        return [1]
    least = degrees.get("pp", 1)  # each stage of a pipeline has one
    return [n for n in range(least, min(share, _MOST_PARTS) + 1) if share % n == 0] or [1]


def _layout(
    config: Config, nodes: int, per_node: int, degrees: dict[str, int], mode: str, parts: int
) -> Layout:
    fsdp = replace(config.parallel.fsdp, offload="offload" in degrees)
    parallel = replace(config.parallel, weights=None, fsdp=fsdp, tp=1, pp=1, cp=1, ep=1)
    for key in degrees.keys() - {"offload"}:
        setattr(parallel, key, degrees[key])
    train = replace(
        config.train, activation_checkpointing=mode, accumulate=parts, micro_batch_size=None
    )
    launch = replace(config.launch, nodes=nodes, tasks_per_node=per_node)
    if launch.gpus_per_node or config.hardware.get("devices"):
        launch.gpus_per_node = per_node
    changed = replace(config, parallel=parallel, train=train, launch=launch)
    return Layout(changed, nodes, _differences(config, changed))


def _differences(config: Config, changed: Config) -> tuple[str, ...]:
    """Return the overrides that make the second config of the first."""
    names = [f"launch.{name}" for name in ("nodes", "tasks_per_node", "gpus_per_node")]
    names += [f"parallel.{name}" for name in (*Degrees.__dataclass_fields__, "zero", "ep")]
    names += ["parallel.weights", "parallel.fsdp.offload"]
    names += [f"train.{n}" for n in ("micro_batch_size", "accumulate", "activation_checkpointing")]
    found = []
    for name in names:
        before, after = attrgetter(name)(config), attrgetter(name)(changed)
        if before != after or name in ("launch.nodes", "launch.tasks_per_node"):
            text = "null" if after is None else str(after).lower()
            found.append(f"{name}={text}")
    return tuple(found)
