"""Which rank is where: its coordinates, and a picture of the mesh in text.

rank = (((pp x dp_replicate + r) x dp_shard + s) x cp + c) x tp + t        as hpctrain.parallel.mesh
"""

from collections.abc import Iterator

from hpctrain.config.rules.degrees import Degrees

_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # the outermost first
_SHOWN_NODES = 8
_HOLDS = {
    "pp": "the layers of stage {0}",
    "dp_shard": "part {0} of {1} of each parameter",
    "dp_replicate": "replica {0}",
    "cp": "part {0} of {1} of each sequence",
    "tp": "part {0} of {1} of each layer",
}


def coordinates(degrees: Degrees, rank: int) -> dict[str, int]:
    """Return the place of a rank, by the names of the degrees."""
    found = {}
    for name in reversed(_ORDER):
        rank, found[name] = divmod(rank, getattr(degrees, name))
    return {name: found[name] for name in _ORDER}


def held_by(degrees: Degrees, rank: int) -> str:
    """Return what a rank holds, in words."""
    place = coordinates(degrees, rank)
    parts = [
        text.format(place[name], getattr(degrees, name))
        for name, text in _HOLDS.items()
        if getattr(degrees, name) > 1
    ]
    return ", ".join(parts) or "everything"


def picture(degrees: Degrees, per_node: int) -> Iterator[str]:
    """Yield the lines of a picture: a line for each node, with the place of each of its ranks."""
    names = [name for name in _ORDER if getattr(degrees, name) > 1] or ["dp_replicate"]
    yield f"ranks by {' . '.join(names)} (the last one are neighbours)"
    nodes = -(-degrees.ranks // per_node)
    width = len(str(degrees.ranks - 1))
    shown = range(nodes) if nodes <= _SHOWN_NODES else [*range(_SHOWN_NODES - 1), nodes - 1]
    before = -1
    for node in shown:
        if node != before + 1:
            yield f"  ...    {node - before - 1} nodes"
        before = node
        ranks = range(node * per_node, min(degrees.ranks, (node + 1) * per_node))
        cells = []
        for rank in ranks:
            place = coordinates(degrees, rank)
            cells.append(f"{rank:>{width}}:{'.'.join(str(place[name]) for name in names)}")
        yield f"  node {node:<3} {'  '.join(cells)}"
