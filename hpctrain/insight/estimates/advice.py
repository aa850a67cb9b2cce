"""What a user could change: a key with its value, what that does, and what it lowers.

a row of advice.yaml ── applies to this config? ── allowed for these ranks? ── two of them, as text

tests/estimates/test_advice.py lets `plan` agree that each cure lowers what it says, where plan can
judge. An override that the checks of a config refuse is not advised.
"""

import copy
import functools
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import yaml

from hpctrain.base.errors import ConfigError
from hpctrain.base.files import yaml_file
from hpctrain.config.frozen import types
from hpctrain.config.job_request import size_problems
from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.combinations import meets
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config

CORES_PER_GPU = 2  # which reading and starting kernels need
HOST_GB_PER_GPU = 8  # which torch, NCCL and the loader need
_SHOWN = 2


class Cure(NamedTuple):
    """One thing to change: a row of advice.yaml, which explains its parts."""

    overrides: str
    does: str
    when: str | None
    lowers: str | None

    def allowed(self, config: Config, ranks: int, power: int = 2) -> str:
        """Return the overrides for a config; "" if they cannot help, or a check refuses them."""
        degrees = Degrees.of(config.parallel, ranks)
        if self.when and not meets(config, self.when, degrees):
            return ""
        try:
            overrides = self.overrides.format_map(_values(config, degrees, power))
        except KeyError:  # there is no such value
            return ""
        made = changed(config, overrides)
        return "" if made == config or any(size_problems(made, ranks)) else overrides


@functools.cache
def table() -> dict[str, list[Cure]]:
    """Return the cures of advice.yaml, by what they are for."""
    found = yaml_file.read(Path(__file__).with_name("advice.yaml"))
    return {kind: [Cure(*row) for row in rows] for kind, rows in found.items()}


def cures(kind: str, config: Config, ranks: int, power: int = 2) -> str:
    """Return what could be changed, as the end of a sentence; "" if nothing is known.

    `kind` is a name of advice.yaml, and a micro-batch may become `power` times larger.
    """
    found = []
    try:
        for cure in table()[kind]:
            if overrides := cure.allowed(config, ranks, power):
                text = " ".join(f"`{override}`" for override in overrides.split())
                found.append(f"{text} {cure.does}")
    except ConfigError:  # the run had other ranks than the config allows
        return ""
    return "; or ".join(found[:_SHOWN])


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
    batch = BatchSizes.of(train, config.parallel, degrees)
    found = {
        "larger_batch": 2 * train.global_batch_size,
        "threads": 2 * max(1, data.threads),
        "workers": 2 * data.workers or min(4, max(1, launch.cpus_per_task)),
    }
    if train.micro_batch_size is None:
        found["fewer"] = train.accumulate // min(power, train.accumulate)
    elif str(train.micro_batch_size).isdecimal():
        found["room"] = min(batch.micro * power, batch.share)
    return {name: value for name, value in found.items() if value}
