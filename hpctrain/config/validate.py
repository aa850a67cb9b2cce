"""Check a config before anything is written.

    each key, each object, each form ── any problem? ── no ── between the keys ── for each layout

The rule of a single key stands with the key in `hpctrain.config.schema`, and the rules between keys
in `hpctrain.config.rules`, one file for each subject. With a wrong value, rules between keys would
report confusing problems, so they come second.
"""

from collections.abc import Iterator, Sequence

from hpctrain.base.hardware import of_section
from hpctrain.config import rank_counts
from hpctrain.config.frozen import plain
from hpctrain.config.rules import data_sets, job, metrics, objects, starting_weights
from hpctrain.config.rules.pairs import refused
from hpctrain.config.schema import Config, all_keys
from hpctrain.errors import ConfigError


def validate(config: Config, world_size: int | None = None) -> None:
    """Check every value, and what must hold between several of them.

    The ConfigError has a line for each problem, with the key, its value and what is allowed.
    Without `world_size` the ranks are those that `launch` requests.
    """
    sizes = [world_size] if world_size else config.asked_world_sizes
    if problems := list(_alone(config)) or list(_between(config, sizes)):
        raise ConfigError("\n".join(problems))


def validate_job(config: Config, sections: Sequence[str]) -> None:
    """Check the resources of a job that is no training, in these sections and keys."""
    problems = list(_values(config, sections))
    written = *job.written_secrets(plain(config)), *job.for_a_shell(plain(config))
    if problems := problems or [*written, *job.resources(config)]:
        raise ConfigError("\n".join(problems))


def _values(config: Config, sections: Sequence[str] | None = None) -> Iterator[str]:
    for key in all_keys():
        asked = sections is None or key.name.partition(".")[0] in sections
        if asked and (problem := key.rule.problem(key.name, key.value(config))):
            yield problem


def _alone(config: Config) -> Iterator[str]:
    """Yield what is wrong with single values, objects and lists."""
    yield from _values(config)
    yield from objects.problems(config)
    yield from job.for_a_shell(plain(config))
    yield from data_sets.problems(config.data)
    yield from job.written_secrets(plain(config))
    yield from data_sets.val_set_problems(config.data)
    yield from starting_weights.problems(config.checkpoint)
    try:
        of_section(config.hardware)
    except ConfigError as error:
        yield str(error)
    yield from job.tracked(config.tracking, config.notify)


def _between(config: Config, sizes: Sequence[int]) -> Iterator[str]:
    yield from data_sets.between(config.data)
    yield from refused(config, "always")
    yield from job.resources(config)
    yield from metrics.problems(config)
    yield from rank_counts.problems(config, sizes)
