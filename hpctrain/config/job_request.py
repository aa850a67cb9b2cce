"""What the jobs of a run ask the cluster for: the part of a config that a batch script is made of.

Config ── JobRequest.of() ── cluster.slurm: script, sbatch, excluded hosts
ranks ── degrees ── shares, combinations, divisions, samples, batch sizes ── do so many nodes fit?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules import batch_sizes
from hpctrain.config.rules.combinations import division_problems, parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, LaunchConfig, SiteConfig

_SHOWN = 2  # numbers of nodes whose problems an error shows
_FAR = 1000  # how far from the range of nodes a number that fits is looked for


@dataclass(frozen=True)
class JobRequest:
    """The resources of a job, its name, and the folders that its ranks use."""

    name: str
    output_dir: str
    launch: LaunchConfig
    site: SiteConfig
    nodes: list[int]  # the numbers of nodes with which the run can train, increasing
    data: list[str]  # the paths of the data sets
    mixed: bool  # its nodes may differ

    @classmethod
    def of(cls, config: Config) -> JobRequest:
        """Return what a valid config asks for."""
        return cls(
            name=config.name,
            output_dir=config.output_dir,
            launch=config.launch,
            site=config.site,
            nodes=fitting_nodes(config),
            data=config.data.paths,
            mixed=_may_differ(config.site, config.parallel.weights),
        )

    @property
    def alike(self) -> bool:
        """Whether all of its nodes must be alike, and there are several."""
        return self.launch.nodes != 1 and not self.mixed


def _may_differ(site: SiteConfig, weights: Sequence[int] | None) -> bool:
    """Return whether the nodes of a job may differ.

    It has `parallel.weights`, or a choice of partitions, types of GPUs or features.
    """
    chosen = f"{site.partition} {site.gpu_type} {site.constraint}"
    return weights is not None or "," in chosen or "|" in chosen


def rank_problems(config: Config, sizes: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong with every number of ranks; there is one for each number of nodes."""
    wrong = [list(size_problems(config, ranks)) for ranks in sizes]
    if all(wrong):
        yield from _of_all(config, wrong)


def _of_all(config: Config, wrong: Sequence[list[str]]) -> Iterator[str]:
    """Yield the problems that every number of ranks has, or one of each and numbers that fit."""
    always = [problem for problem in wrong[0] if all(problem in found for found in wrong)]
    yield from always
    if not always:
        nodes = config.launch.node_numbers
        reasons = [f"{n} nodes: {found[0]}" for n, found in zip(nodes, wrong, strict=True)]
        more = f"; and so on up to {nodes[-1]} nodes" if len(reasons) > _SHOWN else ""
        below = (n for n in range(nodes[0] - 1, max(0, nodes[0] - _FAR), -1))
        above = (n for n in range(nodes[-1] + 1, nodes[-1] + _FAR))
        near = [next((n for n in numbers if _fits(config, n)), None) for numbers in (below, above)]
        fitting = " or ".join(f"launch.nodes={n}" for n in near if n is not None)
        yield (
            f"launch.nodes={config.launch.nodes}: no number of nodes in this range fits "
            f"({'; '.join(reasons[:_SHOWN])}{more})" + (f": use {fitting}" if fitting else "")
        )


def fitting_nodes(config: Config) -> list[int]:
    """Return the numbers of nodes of a valid config that fit the global batch and the degrees."""
    nodes = config.launch.node_numbers
    return list(nodes) if len(nodes) == 1 else [n for n in nodes if _fits(config, n)]


def _fits(config: Config, nodes: int) -> bool:
    return not any(size_problems(config, nodes * config.launch.tasks_per_node))


def size_problems(config: Config, ranks: int) -> Iterator[str]:
    """Yield what is wrong for this number of ranks."""
    try:
        degrees = Degrees.of(config.parallel, ranks, partial(_job, config, ranks))
    except ConfigError as error:
        yield str(error)
        return
    weights = config.parallel.weights
    if weights and (wrong := list(batch_sizes.weight_problems(config.launch, weights, degrees))):
        yield from wrong
        return
    yield from parallel_problems(config, degrees)
    yield from division_problems(config, degrees)
    yield from batch_sizes.problems(config.train, config.parallel, degrees)


def _job(config: Config, ranks: int) -> str:
    """Return how the number of ranks comes about, for an error."""
    launch = config.launch
    if ranks not in config.asked_world_sizes:
        return f"{ranks} rank{'s' if ranks > 1 else ''}"
    nodes = ranks // launch.tasks_per_node
    return f"{nodes} nodes x {launch.tasks_per_node} tasks = {ranks}"
