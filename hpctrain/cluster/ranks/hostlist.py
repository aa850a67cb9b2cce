"""The short forms of node names, task counts and numbers that Slurm uses."""

import re
from collections.abc import Iterable, Sequence

from hpctrain.base.errors import DistributedError

_COMMA = re.compile(r",(?![^\[\]]*\])")  # outside of brackets
_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's hostlist syntax to host names, in the order of `scontrol show hostnames`.

    Containers often lack `scontrol`, so this is our own parser.

    >>> expand_hostlist("rack[1-2]n[01-02],gpu-a100")
    ['rack1n01', 'rack1n02', 'rack2n01', 'rack2n02', 'gpu-a100']
    """
    hosts: list[str] = []
    for item in _COMMA.split(text):
        if not _ITEM.fullmatch(item):
            raise DistributedError(f"hostlist {text!r}: unbalanced brackets or an empty name")
        prefixes = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            tails = [literal] if literal else list(_expand_ranges(ranges, text))
            prefixes = [prefix + tail for prefix in prefixes for tail in tails]
        hosts.extend(prefixes)
    return hosts


def _expand_ranges(ranges: str, text: str) -> Iterable[str]:
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise DistributedError(f"hostlist {text!r}: {part!r} is no number or range")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise DistributedError(f"hostlist {text!r}: range {part!r} runs backwards")
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))


def expand_tasks(text: str) -> list[int]:
    """Expand Slurm's syntax for tasks per node to one count per node.

    >>> expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise DistributedError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: {part!r} is no count")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def listed(numbers: Sequence[int], between: str = ", ") -> str:
    """Return sorted numbers as text, successive ones as a range: `4, 6-8`."""
    known = {*numbers}
    starts = [n for n in numbers if n - 1 not in known]
    ends = [n for n in numbers if n + 1 not in known]
    pairs = zip(starts, ends, strict=True)
    return between.join(f"{a}-{b}" if b > a else str(a) for a, b in pairs)
