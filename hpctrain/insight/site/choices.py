"""From what was read to the lines of a site file: a value for each key, and why it is this one.

    SiteFacts (NodeKind, Partition, Association, …) + Questions ── lines_of ── Line, Line, …

What cannot be read is given on the command line, or asked where a person sits at a terminal, or
left to Slurm; the line says which of them it was.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.base.errors import ConfigError
from hpctrain.cluster.slurm.node_kinds import NodeKind
from hpctrain.insight.site import surroundings
from hpctrain.insight.site.surroundings import Association, usable_cpus
from hpctrain.insight.site.trials import Trials

GIVEN = ("account", "partition", "qos", "constraint", "gpu")
_UNKNOWN = "not known: "


class Line(NamedTuple):
    """A key of `site` with its value, and the comment that stands above it."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Questions:
    """What a person has said already, and how to ask for more."""

    given: Mapping[str, str]
    ask: Callable[[str, Sequence[str]], str] | None = None  # None: nobody is there

    def choose(self, key: str, options: Sequence[str], usual: str | None) -> tuple[str | None, str]:
        """Return one of the options, or `usual`, and who has chosen it."""
        if key in self.given:
            if options and self.given[key] not in options:
                raise ConfigError(
                    f"init-site {key}={self.given[key]}: there is {', '.join(options) or 'none'}"
                )
            return self.given[key], "you have said so"
        if len(options) == 1:
            return options[0], "there is no other"
        if options and self.ask is not None:
            said = self.ask(key, options)
            return said or usual, "you have chosen it" if said else "you have left it open"
        there = f" (there is {', '.join(options)})" if options else ""
        return usual, f"{_UNKNOWN}nobody was asked{there}"


@dataclass(frozen=True)
class SiteFacts:
    """Everything that was read."""

    kinds: Sequence[NodeKind]
    associations: Sequence[Association] | None
    home: Path
    env: Mapping[str, str] = field(default_factory=dict)
    net: Path = surroundings.NET


class Choices:
    """The choices for one cluster, in their order: each depends on those before."""

    def __init__(self, seen: SiteFacts, questions: Questions) -> None:
        self._seen, self._questions = seen, questions
        self.account, account_why = self._account()
        self.kinds, self.gpu, gpu_why = self._gpus()
        self.partition, partition_why = self._partition()
        mine = [each for each in self.kinds if each.partition == self.partition]
        self.kind = max(mine or self.kinds, key=lambda each: (each.count(), each.nodes))
        self.qos, qos_why = self._qos()
        self.constraint = questions.given.get("constraint")
        self.trials = self._try()
        if "partition" in self.trials.problem.lower() and "partition" not in questions.given:
            left, self.partition = self.partition, None
            self.trials = self._try()
            partition_why = f"sbatch refuses {left}: the site chooses it by the other keys"
        self.lines = [
            Line("partition", self.partition, partition_why),
            Line("account", self.account, account_why),
            Line("qos", self.qos, qos_why),
            Line("constraint", self.constraint, self._features()),
            *self._of_trials(gpu_why),
            *self._of_host(),
        ]

    def shape(self) -> str:
        """Return the keys of `launch` for a whole node."""
        kind, ranks = self.kind, max(1, self.kind.count())
        cpus = usable_cpus(kind) // kind.threads
        return (
            f"launch.tasks_per_node={ranks} launch.gpus_per_node={kind.count()} "
            f"launch.cpus_per_task={max(1, cpus // ranks)}"
        )

    def notes(self) -> Iterator[str]:
        """Yield what belongs to no key of `site`."""
        if not math.isinf(self.kind.most_min):
            yield f"launch.time_min is at most {self.kind.most_min:g} (sinfo)"
        if self.kind.is_whole:
            yield "jobs get whole nodes (sinfo: EXCLUSIVE)"
        if self.kind.threads > 1:
            yield f"a core has {self.kind.threads} threads: sbatch: {{hint: nomultithread}} (sinfo)"
        for each in surroundings.folders(self._seen.home, self._seen.env):
            yield f"output_dir and data.path could be in {each}"
        yield f"{_UNKNOWN}what `setup` lines and arguments of srun it takes: see the site's page"

    def _account(self) -> tuple[str | None, str]:
        mine = self._seen.associations
        names = [*dict.fromkeys(each.account for each in mine or ())]
        found, why = self._questions.choose("account", names, None)
        said = "does not answer" if mine is None else f"lists {len(names) or 'none'} for you"
        return found, f"sacctmgr {said}: {why}"

    def _gpus(self) -> tuple[list[NodeKind], str | None, str]:
        """Return the nodes that a training may use, and the type of GPU that was asked for."""
        open_to = [each for each in self._seen.kinds if self._may_use(each)]
        if not open_to:
            raise ConfigError("init-site: sinfo shows no node that is up, open to you and as said")
        with_gpus = [each for each in open_to if each.gpus]
        types = sorted({each for kind in with_gpus for each in kind.gpus if each})
        if not with_gpus:
            return open_to, None, "sinfo: no node has GPUs"
        if len(types) < 2 and "gpu" not in self._questions.given:
            return with_gpus, *((types[0], "") if types else (None, "sinfo names no type"))
        found, why = self._questions.choose("gpu", types, None)
        fitting = [kind for kind in with_gpus if found is None or found in kind.gpus]
        return fitting, found, f"sinfo: {why}"

    def _may_use(self, kind: NodeKind) -> bool:
        feature = self._questions.given.get("constraint", "")
        return kind.is_open and (not re.fullmatch(r"\w+", feature) or feature in kind.features)

    def _partition(self) -> tuple[str | None, str]:
        names = [*dict.fromkeys(kind.partition for kind in self.kinds)]
        size: dict[str, int] = {}
        for kind in self.kinds:
            size[kind.partition] = size.get(kind.partition, 0) + kind.nodes * max(1, kind.count())
        default = [kind.partition for kind in self.kinds if kind.is_default]
        usual = default[0] if default else max(names, key=lambda name: size[name])
        found, why = self._questions.choose("partition", names, usual)
        picked = "the default" if default else "the largest"
        return found, f"sinfo: {why}{f'; this is {picked}' if why.startswith(_UNKNOWN) else ''}"

    def _qos(self) -> tuple[str | None, str]:
        mine = [
            each
            for each in self._seen.associations or ()
            if each.account == self.account and each.partition in ("", self.partition)
        ]
        names = [*dict.fromkeys(name for each in mine for name in each.qos)]
        default = next((each.default_qos for each in mine if each.default_qos), "")
        if "qos" not in self._questions.given and (default or len(names) < 2):
            shown = default or ", ".join(names) or "sacctmgr lists none"
            return None, f"sacctmgr: null is what Slurm gives you without it ({shown})"
        found, why = self._questions.choose("qos", names, None)
        return found, f"sacctmgr: {why}"

    def _features(self) -> str:
        who = "you have said so" if self.constraint else f"{_UNKNOWN}which of them you need"
        return f"sinfo: these nodes have {', '.join(sorted(self.kind.features)) or 'none'}; {who}"

    def _try(self) -> Trials:
        named = {key: getattr(self, key) for key in ("account", "partition", "qos", "constraint")}
        base = {key: value for key, value in named.items() if value} | {"time": "1", "nodes": "1"}
        return Trials(base, self.gpu, self.kind.count() > 0)

    def _of_trials(self, gpu_why: str) -> Iterator[Line]:
        trials, said = self.trials, "sbatch --test-only takes it"
        if not trials.answers:
            said = f"{_UNKNOWN}sbatch --test-only does not answer"
        elif trials.problem:
            said = f"{_UNKNOWN}sbatch --test-only refuses any job ({trials.problem})"
        option, why = trials.gpu_option, said
        if option == "none":
            option = "srun" if self.kind.is_whole else "none"
            why = "sbatch --test-only takes no option for GPUs"
        if self.kind.gpus:
            yield Line("gpu_option", option, why)
        needed = trials.gpu_needs_type or len(self.kind.gpus) > 1
        kind = self.gpu if needed else None
        no_need = "; a request needs no type" if self.gpu and not needed else ""
        if self.gpu or gpu_why:
            yield Line("gpu_type", kind, f"{gpu_why or f'sinfo: {self.gpu}'}{no_need}")
        yield Line("memory_option", trials.memory_option, said)

    def _of_host(self) -> Iterator[Line]:
        modules, why = surroundings.chosen_modules(self._seen.env)
        yield Line("modules", modules, why)
        fast = [each for each in surroundings.interfaces(self._seen.net) if each[:3] == "hsn"]
        if fast:
            why = "/sys/class/net of this host; NCCL would not choose it. `doctor --nodes 1` looks"
            yield Line("env", {"NCCL_SOCKET_IFNAME": ",".join(fast)}, f"{why} at a node")
