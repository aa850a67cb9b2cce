"""The job that evaluates a checkpoint (`evaluation.job`): its config, and what does not fit it."""

from __future__ import annotations

import dataclasses
import difflib
import shutil
from collections.abc import Iterator
from contextlib import suppress

from omegaconf import DictConfig, OmegaConf

from hpctrain.config.frozen import from_omegaconf, known_keys, plain
from hpctrain.config.identity import changeable
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.fitting_layout import fit_batch, fit_layout
from hpctrain.config.schema import Config, EvaluationConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError


def job_config(config: Config) -> Config:
    """Return the config of such a job: that of the run with `evaluation.overrides`.

    If the layout of the run does not fit the ranks of the job, it has another one (`fit_layout`).
    An override that changes the result, or does not fit the schema, is a ConfigError.
    """
    free = tuple(f"{name}." for name in changeable())
    node = OmegaConf.create(plain(config))
    for name, value in config.evaluation.overrides.items():
        where = f"evaluation.overrides={{{name}: {value}}}"
        if not f"{name}.".startswith(free):
            raise ConfigError(
                f"{where} would evaluate something else; only keys of parallel, launch, site and "
                "the like change here"
            )
        if name not in known_keys() or isinstance(OmegaConf.select(node, name), DictConfig):
            near = difflib.get_close_matches(name, known_keys(), 1)
            raise ConfigError(
                f"{where}: there is no such key" + (f"; did you mean {near[0]}?" if near else "")
            )
        OmegaConf.update(node, name, value)
    try:
        made = from_omegaconf(node)
    except ConfigError as error:
        raise ConfigError(f"evaluation.overrides={config.evaluation.overrides}: {error}") from error
    ranks = made.asked_world_sizes[0]
    if not any(name.startswith("parallel.") for name in config.evaluation.overrides):
        fit_layout(made, ranks)
    with suppress(ConfigError):  # the check of the config says it
        fit_batch(made, Degrees.of(made.parallel, ranks))
    return dataclasses.replace(made, evaluation=EvaluationConfig())


def check(config: Config) -> None:
    """Check what `evaluation.job=true` asks of a valid config, before anything is queued."""
    if not config.evaluation.job:
        return
    if problems := list(_problems(config)):
        raise ConfigError("\n".join(problems))
    try:
        validate(job_config(config))
    except ConfigError as error:
        if str(error).startswith("evaluation.overrides"):
            raise
        raise ConfigError(
            f"evaluation.overrides={config.evaluation.overrides}: with these the job is not "
            f"possible: {error}"
        ) from error
    check_sbatch(config)


def check_sbatch(config: Config) -> None:
    """Check that this host has the `sbatch` of `evaluation.job=true`; not in a dry run."""
    wanted = config.evaluation.job and not config.launch.dry_run
    if wanted and shutil.which("sbatch") is None:
        raise ConfigError(
            "evaluation.job=true: each evaluation is a Slurm job, and sbatch is not on the PATH of "
            "this host; with evaluation.job=false the training evaluates by itself"
        )


def _problems(config: Config) -> Iterator[str]:
    if config.data.evaluated is None and not config.data.other_sets:
        yield "evaluation.job=true with data.val_split=null: there is nothing to evaluate"
    if (runtime := config.site.container.runtime) is not None:
        yield (
            f"evaluation.job=true with site.container.runtime={runtime}: the run submits the jobs, "
            "and a container has no sbatch; use evaluation.job=false"
        )
