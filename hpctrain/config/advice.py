"""What a user could change, as data: a key with its value, what that does, and what it lowers.

_CURES["data"] ── applies to this config? ── allowed for these ranks? ── two of them, as text

tests/config/test_advice.py lets `plan` agree that each cure lowers what it says, where plan can
judge. An override that the checks of a config refuse is not advised.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import yaml

from hpctrain.config.frozen import types
from hpctrain.config.rank_counts import size_problems
from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

CORES_PER_GPU = 2  # which reading and starting kernels need
HOST_GB_PER_GPU = 8  # which torch, NCCL and the loader need
_SHOWN = 2


@dataclass(frozen=True)
class _Cure:
    """One thing to change."""

    overrides: str  # for the command line; names in braces are those of `_values`
    does: str  # what follows from them, after "which"
    # Whether it can help a config at all, beside being another value that is allowed.
    applies: Callable[[Config, Degrees], bool] = lambda config, degrees: True
    lowers: str = ""  # the figure of `plan` that becomes smaller; "" if plan does not judge it


def _shards(config: Config, degrees: Degrees) -> bool:
    return degrees.dp_shard > 1 and config.parallel.zero == 3


def _across_nodes(config: Config, degrees: Degrees) -> bool:
    whole = degrees.dp_shard == degrees.ranks and degrees.ranks > config.launch.tasks_per_node
    return whole and config.parallel.zero == 3 and config.launch.tasks_per_node > 1


_STATES = (
    _Cure(
        "parallel.dp_replicate=1 parallel.dp_shard=-1 parallel.zero=3",
        "divides parameters, gradients and the optimizer's state over the ranks",
        lambda config, degrees: degrees.dp > 1,
        "memory",
    ),
    _Cure(
        "parallel.dp_replicate=1 parallel.dp_shard=-1 parallel.zero=3 parallel.fsdp.offload=true",
        "keeps the optimizer's state in the memory of the host",
        lowers="memory",
    ),
)
_ONE_ROW = (
    _Cure("train.activation_checkpointing=full", "computes activations again", lowers="memory"),
    *_STATES,
)
_CURES = {
    "communication": (
        _Cure(
            "parallel.dp_replicate=-1 parallel.dp_shard={node}",
            "gathers parameters inside of each node, where they have room",
            _across_nodes,
            "comm_s",
        ),
        _Cure(
            "train.accumulate={fewer}",
            "sends less often, where larger micro-batches have room",
            lambda config, degrees: degrees.dp_shard > 1 and config.parallel.zero > 1,
            "comm_s",
        ),
        _Cure(
            "parallel.zero=1",
            "gathers parameters once a step, where they have room",
            _shards,
            "comm_s",
        ),
        _Cure(
            "precision.reduce=bf16",
            "sends half of the bytes of gradients",
            lambda config, degrees: degrees.dp > 1 and config.precision.params == "fp32",
            "comm_s",
        ),
        _Cure(
            "train.global_batch_size={larger_batch}",
            "makes fewer steps of the same samples; the learning rate may need a change",
            lambda config, degrees: config.train.accumulate == 1,
            "comm_s_per_sample",
        ),
        _Cure(
            "launch.nodes={fewer_nodes}",
            "has fewer ranks that wait for each other",
            lambda config, degrees: degrees.ranks > config.launch.tasks_per_node,
            "comm_s_per_sample",
        ),
    ),
    "memory": (
        _Cure("train.accumulate={more}", "makes the micro-batches smaller", lowers="memory"),
        _Cure("train.micro_batch_size={less}", "makes the micro-batches smaller", lowers="memory"),
        _Cure(
            "train.micro_batch_size=auto",
            "finds the size that fits",
            lambda config, degrees: config.parallel.device != "cpu",
        ),
        *_ONE_ROW,
    ),
    "one row": _ONE_ROW,
    "states": _STATES,
    "room": (
        _Cure("train.accumulate={fewer}", "makes the micro-batches larger", lowers="step_s"),
        _Cure("train.micro_batch_size={room}", "makes the micro-batches larger", lowers="step_s"),
        _Cure(
            "train.activation_checkpointing=none", "computes no activations twice", lowers="step_s"
        ),
        _Cure(
            "train.global_batch_size={larger_batch}",
            "has more work in a step; the learning rate may need a change",
            lambda config, degrees: config.train.accumulate == 1,
            "step_s_per_sample",
        ),
    ),
    "data": (
        _Cure(
            "data.workers={workers}",
            "lets processes apply `data.transforms`, which hold each other up in threads",
            lambda config, degrees: bool(config.data.transforms),
        ),
        _Cure(
            "data.threads={threads}",
            "reads and decodes more at a time",
            lambda config, degrees: not config.data.transforms,
        ),
        _Cure("data.stage=node", "copies the shards to the node's own disk"),
    ),
}


def cures(kind: str, config: Config, ranks: int, power: int = 2) -> str:
    """Return what could be changed, as the end of a sentence; "" if nothing is known.

    `kind` is a name of `_CURES`, and a micro-batch may become `power` times larger.
    """
    try:
        degrees = Degrees.of(config.parallel, ranks)
    except ConfigError:  # the run had other ranks than the config allows
        return ""
    found = []
    for cure in _CURES[kind]:
        if overrides := _overrides(cure, config, degrees, ranks, power):
            text = " ".join(f"`{override}`" for override in overrides.split())
            found.append(f"{text} {cure.does}")
    return "; or ".join(found[:_SHOWN])


def _overrides(cure: _Cure, config: Config, degrees: Degrees, ranks: int, power: int) -> str:
    """Return the overrides of a cure for a config; "" if it cannot help, or a check refuses it."""
    if not cure.applies(config, degrees):
        return ""
    try:
        overrides = cure.overrides.format_map(_values(config, degrees, power))
    except KeyError:  # there is no such value
        return ""
    made = changed(config, overrides)
    if made.launch.nodes != config.launch.nodes:
        ranks = made.asked_world_sizes.start
    return "" if made == config or any(size_problems(made, ranks)) else overrides


def changed(config: Config, overrides: str) -> Config:
    """Return a config with other values of single keys."""
    made = copy.deepcopy(config)
    for key, _, text in (override.partition("=") for override in overrides.split()):
        section, _, name = key.rpartition(".")
        value = text if types()[key].startswith("str") else yaml.safe_load(text)
        setattr(attrgetter(section)(made), name, value)
    return made


def _values(config: Config, degrees: Degrees, power: int) -> dict[str, int]:
    """Return the values that stand in the overrides; without those that would change nothing."""
    train, data, launch = config.train, config.data, config.launch
    batch = BatchSizes.of(config, degrees)
    found = {
        "node": launch.tasks_per_node,
        "larger_batch": 2 * train.global_batch_size,
        "threads": 2 * max(1, data.threads),
        "workers": 2 * data.workers or min(4, max(1, launch.cpus_per_task)),
    }
    if train.micro_batch_size is None:
        found["more"] = next(
            (n for n in range(train.accumulate + 1, batch.share + 1) if batch.share % n == 0), 0
        )
        found["fewer"] = train.accumulate // min(power, train.accumulate)
    elif str(train.micro_batch_size).isdecimal():
        found["less"] = batch.micro // 2
        found["room"] = min(batch.micro * power, batch.share)
    if isinstance(launch.nodes, int) or str(launch.nodes).isdecimal():
        found["fewer_nodes"] = int(launch.nodes) // 2
    return {name: value for name, value in found.items() if value}
