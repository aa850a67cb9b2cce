"""The swept values of runs: what distinguishes the runs of one sweep.

    optimizer.lr=0.001,0.003 seed=0,1 ── run.json: ["optimizer.lr=0.001", "seed=0"]
                                      ├─ status, and the name in MLflow: lr=0.001 seed=0
                                      └─ the name of the sweep's parent: lr=0.001,0.003 seed=0,1

A key is shown by its last part, unless two keys end in the same word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from hpctrain import secrets

_LONGEST = 100  # characters of a name in MLflow's tables


def values_of(runs: Sequence[Sequence[str]], searched: Collection[str] = ()) -> list[list[str]]:
    """Return the swept overrides of each run, with secrets masked: the texts are for people.

    Args:
        runs: The overrides of each run.
        searched: The keys that a search varies; its runs come in several sweeps, even one by one.
    """
    common = set.intersection(*map(set, runs)) if runs else set()
    return [
        [
            secrets.mask(text)
            for text in run
            if text.partition("=")[0] in searched or (not searched and text not in common)
        ]
        for run in runs
    ]


def label(values: Iterable[str]) -> str:
    """Return the values as a short text: `lr=0.001 seed=0` for `optimizer.lr=0.001`, `seed=0`."""
    return _joined(text.partition("=")[::2] for text in values)


def titled(name: str, values: Iterable[str]) -> str:
    """Return the name that a run has in MLflow: its own one, and its swept values."""
    return " ".join(filter(None, (name, label(values))))


def span(runs: Iterable[Iterable[str]]) -> str:
    """Return all values of several runs as a short text: `lr=0.001,0.003 seed=0,1`."""
    found: dict[str, dict[str, None]] = {}
    for values in runs:
        for text in values:
            key, _, value = text.partition("=")
            found.setdefault(key, {})[value] = None
    return _joined((key, ",".join(values)) for key, values in found.items())


def _joined(pairs: Iterable[tuple[str, str]]) -> str:
    pairs = list(pairs)
    names = Counter(key.rpartition(".")[2] for key, _ in pairs)
    shortest = [
        (name if names[name := key.rpartition(".")[2]] == 1 else key, value) for key, value in pairs
    ]
    text = " ".join(f"{name}={value}" for name, value in shortest)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
