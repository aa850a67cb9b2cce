"""The numbers of ranks and nodes with which a config can run.

ranks ── degrees ── shares, combinations, divisions, samples, batch sizes ── problems
"""

from collections.abc import Iterator, Sequence
from functools import partial

from hpctrain.config.rules import batch_sizes
from hpctrain.config.rules.combinations import division_problems, parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

_SHOWN = 2  # numbers of nodes whose problems an error shows
_FAR = 1000  # how far from the range of nodes a number that fits is looked for


def problems(config: Config, sizes: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong with every number of ranks; there is one for each number of nodes."""
    wrong = [list(size_problems(config, ranks)) for ranks in sizes]
    if not all(wrong):
        return
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
    if wrong := list(batch_sizes.weight_problems(config.launch, config.parallel.weights, degrees)):
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
