"""Check a config before anything is written.

    each key, each object, each form ── any problem? ── no ── between the keys ── for each layout

The rule of a single key stands with the key in `hpctrain.config.schema`, and the rules between keys
in `hpctrain.config.rules`, one file for each subject. With a wrong value, rules between keys would
report confusing problems, so they come second. What has its default is right by itself, so a rule
is only asked if the config gives one of the keys that it is about.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError
from hpctrain.config.frozen import plain
from hpctrain.config.job_request import rank_problems
from hpctrain.config.rules import data_sets, job, metrics, objects, own_loop, parameter_rules
from hpctrain.config.rules.combinations import refused
from hpctrain.config.schema import Config
from hpctrain.config.schema.key import changed


def _hardware(config: Config) -> Iterator[str]:
    try:
        offered.hardware.of_section(config.hardware)
    except ConfigError as error:
        yield str(error)


# What the keys begin with that a rule is about, and the rule.
_Rules = tuple[tuple[tuple[str, ...], Callable[[Config], Iterable[str]]], ...]

_ALONE: _Rules = (
    (("",), objects.problems),
    (("",), lambda config: job.text_problems(plain(config))),
    (("data.mixture",), lambda config: data_sets.problems(config.data)),
    (("data.val_sets",), lambda config: data_sets.val_set_problems(config.data)),
    (
        ("checkpoint.init_from", "checkpoint.init_rename"),
        lambda config: parameter_rules.starting_problems(config.checkpoint),
    ),
    (("hardware",), _hardware),
)
_BETWEEN: _Rules = (
    (("data.fold", "data.stage"), lambda config: data_sets.between(config.data)),
    (("",), lambda config: refused(config, "always")),
    (("launch.", "site.", "monitor."), job.resources),
    (("metric", "train.early_stopping.", "checkpoint.best", "scheduler.kind"), metrics.problems),
)


def validate(config: Config, world_size: int | None = None) -> None:
    """Check every value, and what must hold between several of them.

    The ConfigError has a line for each problem, with the key, its value and what is allowed.
    Without `world_size` the ranks are those that `launch` requests.
    """
    sizes = [world_size] if world_size else config.asked_world_sizes
    given = [key.name for key, _ in changed(config)]
    problems = [*_values(config), *_asked(_ALONE, config, given)]
    if not problems and own_loop.has_own(config):
        problems = [*job.resources(config), *own_loop.problems(config, sizes)]
    elif not problems:
        problems = [*_asked(_BETWEEN, config, given), *rank_problems(config, sizes)]
    if problems:
        raise ConfigError("\n".join(problems))


def validate_job(config: Config, sections: Sequence[str]) -> None:
    """Check the resources of a job that is no training, in these sections and keys."""
    problems = [*_values(config, sections)]
    if problems := problems or [*job.text_problems(plain(config)), *job.resources(config)]:
        raise ConfigError("\n".join(problems))


def _values(config: Config, sections: Sequence[str] | None = None) -> Iterator[str]:
    for key, value in changed(config):
        asked = sections is None or key.name.partition(".")[0] in sections
        if asked and (problem := key.rule.problem(key.name, value)):
            yield problem


def _asked(rules: _Rules, config: Config, given: Sequence[str]) -> Iterator[str]:
    for about, rule in rules:
        if any(name.startswith(about) for name in given):
            yield from rule(config)
