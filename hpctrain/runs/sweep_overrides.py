"""The swept values of runs: what distinguishes the runs of one sweep.

    optimizer.lr=0.001,0.003 seed=0,1 ── run.json: ["optimizer.lr=0.001", "seed=0"]
                                      ├─ status, and the name in MLflow: lr=0.001 seed=0
                                      └─ the name of the sweep's parent: lr=0.001,0.003 seed=0,1

Runs that were started one by one are told apart by what differs in their configs.
A key is shown by its last part, unless two keys end in the same word.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpctrain.base import secrets
from hpctrain.base.files.yaml_file import flat
from hpctrain.config.identity import changeable, override_key

_GLOBAL = ("experiment", "debug")  # choices that may set any key
_LONGEST = 100  # characters of a name in MLflow's tables


def values_of(runs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the swept overrides of each run, with secrets masked: the texts are for people."""
    common = set.intersection(*map(set, runs)) if runs else set()
    return [[secrets.mask(text) for text in run if text not in common] for run in runs]


def distinguishing(runs: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> list[dict[str, str]]:
    """Return what distinguishes runs, by key, whoever has started them, and in whatever sweeps.

    A choice such as `optimizer=sgd` stands for all the keys that differ because of it. A run is its
    frozen config and its overrides.
    """
    configs = [flat(config) for config, _ in runs]
    given = [{override_key(text): text.partition("=")[2] for text in texts} for _, texts in runs]
    asked, leaves = ({key for one in each for key in one} for each in (given, configs))
    order = filter(_matters, dict.fromkeys(key for one in [*given, *configs] for key in one))
    differing = [
        key
        for key in order
        # A config that cannot be read, or is older than the key, does not differ in it.
        if len({_text(one[key]) for one in configs if key in one}) > 1
        or (key not in leaves and len({one.get(key) for one in given}) > 1)
    ]
    choices = [key for key in differing if key not in leaves]
    covered = tuple("" if key in _GLOBAL else f"{key}." for key in choices)
    keys = [
        key for key in differing if key in leaves and (key in asked or not key.startswith(covered))
    ]
    return [
        {key: secrets.mask(texts.get(key, "")) for key in choices}
        | {key: secrets.mask(_text(config.get(key))) for key in keys}
        for config, texts in zip(configs, given, strict=True)
    ]


def _matters(key: str) -> bool:
    """Return whether a key may decide the result of a run."""
    left_out = (*changeable(), "hydra")
    return not any(key == each or key.startswith((f"{each}.", f"{each}/")) for each in left_out)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def label(values: Iterable[str]) -> str:
    """Return the values as a short text: `lr=0.001 seed=0` for `optimizer.lr=0.001`, `seed=0`."""
    return _joined(text.partition("=")[::2] for text in values)


def titled(name: str, values: Sequence[str]) -> str:
    """Return the name that a run has in MLflow: its own one, and its swept values."""
    return f"{name} {label(values)}" if values else name


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
