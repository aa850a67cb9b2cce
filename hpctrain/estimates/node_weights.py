"""`parallel.weights=auto`: shares of the batch for nodes of different speed, from measured times.

    a run, bench --save ── seconds of each rank for a sample ── the slowest rank of each node
    weights             ── smallest max(weight x seconds) / sum(weights) ── whole numbers

The sum of the weights must divide the batch. Larger numbers follow the speeds more closely, but
make smaller micro-batches, so they are taken only where they save a tenth of the step.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.rules.batch_sizes import named_sizes
from hpctrain.config.schema import Config
from hpctrain.disk import expanded
from hpctrain.errors import ConfigError
from hpctrain.estimates.bench_figures import Figures
from hpctrain.estimates.like_runs import differences, runs_of_model
from hpctrain.estimates.measured_run import measured_run

AUTO = "auto"
_LARGEST = 8  # the mean weight: larger sums make smaller micro-batches
_SAVES = 0.1  # of the time of a step


@dataclass(frozen=True)
class _Speeds:
    """How fast the ranks of a run or a benchmark were."""

    name: str
    nodes: int
    rank_s: tuple[float, ...]
    hosts: tuple[str, ...]

    @property
    def node_s(self) -> list[float]:
        """The seconds of each node: those of its slowest rank."""
        each = len(self.rank_s) // self.nodes
        return [max(self.rank_s[i * each : (i + 1) * each]) for i in range(self.nodes)]


def pin(config: Config) -> None:
    """Put numbers in the place of `parallel.weights=auto`, in place; equal ones become null.

    `output_dir` is absolute. It raises a ConfigError if nothing has measured these ranks and this
    model.
    """
    parallel, launch = config.parallel, config.launch
    asked = parallel.weights
    if not isinstance(asked, str) or asked.partition(":")[0] != AUTO:
        return  # other texts are refused with the other values
    numbers = launch.node_numbers
    if len(numbers) > 1:
        raise ConfigError(f"parallel.weights={asked} with launch.nodes={launch.nodes}: give one")
    if numbers.start == 1:
        raise ConfigError(
            f"parallel.weights={asked} with launch.nodes=1: the weights are those of nodes, and "
            "the ranks of a node have the same"
        )
    speeds = _speeds(config, asked)
    ranks = config.asked_world_sizes.start
    if (speeds.nodes, len(speeds.rank_s)) != (numbers.start, ranks):
        raise ConfigError(
            f"parallel.weights={asked}: {speeds.name} had {len(speeds.rank_s)} ranks on "
            f"{speeds.nodes} nodes, and this run has {ranks} on {numbers.start}; measure the same"
        )
    weights = _best(speeds.node_s, _sums(config, launch.tasks_per_node))
    parallel.weights = None if len(set(weights)) == 1 else weights
    parallel.weights_hosts = [*speeds.hosts] if parallel.weights else []


def note(config: Config) -> str:
    """Return what `parallel.weights=auto` has taken, for a reader, after `pin`."""
    weights, hosts = config.parallel.weights, ",".join(config.parallel.weights_hosts)
    if weights is None:
        return "parallel.weights=auto: the nodes are alike, so each gets the same share"
    if not hosts:
        return f"parallel.weights=auto is {weights}"
    return (
        f"parallel.weights=auto is {weights}, for the nodes {hosts} in this order: "
        f"+site.sbatch.nodelist={hosts} asks for them, and a job on others warns"
    )


def _best(node_s: Sequence[float], sums: Iterable[int]) -> list[int]:
    """Return the weights with the shortest step; a larger sum only where it saves enough."""
    best = [1] * len(node_s)
    for total in sums:
        weights = [1] * len(node_s)
        for _ in range(total - len(node_s)):
            # One more share goes where the step gets longer by least.
            i = min(range(len(node_s)), key=lambda n: (weights[n] + 1) * node_s[n])
            weights[i] += 1
        if _step(weights, node_s) < (1 - _SAVES) * _step(best, node_s):
            best = weights
    return best


def _step(weights: Sequence[int], node_s: Sequence[float]) -> float:
    """Return the seconds of a step, divided by the samples of a rank with an equal share."""
    return max(w * s for w, s in zip(weights, node_s, strict=True)) / sum(weights)


def _sums(config: Config, per_node: int) -> list[int]:
    """Return the sums of weights that divide every batch of the run, the smallest first."""
    train, nodes = config.train, config.launch.node_numbers.start
    size = train.micro_batch_size
    number = int(size) if size is not None and size.isdecimal() else train.accumulate
    return [
        total
        for total in range(nodes + 1, _LARGEST * nodes + 1)
        if all(batch % (total * per_node * number) == 0 for batch in named_sizes(train).values())
    ]


def _speeds(config: Config, asked: str) -> _Speeds:
    given = asked.partition(":")[2]
    if not given:
        return _newest(config)
    path = Path(os.path.abspath(expanded(given, "parallel.weights")))
    if path.is_file():
        return _of_bench(config, path)
    run = measured_run(path)
    different = "; ".join(differences(config, run.config))
    if different or not run.rank_s:
        raise ConfigError(f"parallel.weights=auto:{path}: {different or _UNKNOWN}")
    return _Speeds(path.name, run.nodes, run.rank_s, run.hosts)


def _newest(config: Config) -> _Speeds:
    """Return the speeds of the newest run of the same model on as many nodes and ranks."""
    size = config.launch.node_numbers.start, config.asked_world_sizes.start
    others = "no run there has measured this model"
    for run in runs_of_model(config):
        name = run.path.name
        if different := differences(config, run.config):
            others = f"{name} has the same model, but {'; '.join(different)}"
        elif (run.nodes, run.ranks) != size:
            others = f"{name} had {run.ranks} ranks on {run.nodes} nodes"
        elif run.rank_s:
            return _Speeds(name, run.nodes, run.rank_s, run.hosts)
        else:
            others = f"{name}: {_UNKNOWN}"
    raise ConfigError(
        f"parallel.weights=auto: no run in {config.output_dir} tells how fast each rank is "
        f"({others}); train 40 steps with equal shares (train.max_steps=40 train.log_every=5), or "
        "give auto:FILE, a file of bench --save"
    )


def _of_bench(config: Config, path: Path) -> _Speeds:
    """Return the speeds in a file of `bench --save`."""
    what = f"parallel.weights=auto:{path}"
    file = Figures.load(path, "parallel.weights=auto:")
    found = _Speeds(path.name, file.setup.get("nodes") or 0, file.facts.rank_s, file.facts.hosts)
    model, compute = (file.setup.get(key) for key in ("model", "precision.compute"))
    if (model, compute) != (config.model, config.precision.compute):
        raise ConfigError(
            f"{what}: it has measured {model} in {compute}, and this run is {config.model} in "
            f"{config.precision.compute}"
        )
    if not found.rank_s:
        raise ConfigError(
            f"{what}: the ranks were not measured one by one: bench does so with several ranks "
            "that each have the whole model, unless it measures one part only"
        )
    return found


_UNKNOWN = (
    "its ranks were not measured one by one: a run does so on CPUs with several ranks, when it has "
    "ended; on GPUs bench --save does"
)
