"""The config with which a trained model is used: by an evaluation job, or by other ranks.

A checkpoint fits any layout. So the ranks that were started decide: tensor and expert parallel stay
where their degrees still divide the ranks, and what is left is data parallel. Where the training
divided the model, the replicas are divided, too (ZeRO-3), so that a rank needs no more memory than
its share.
"""

import dataclasses
import difflib
import shutil
from collections.abc import Iterator
from contextlib import suppress

from omegaconf import DictConfig, OmegaConf

from hpctrain.config.frozen import from_omegaconf, known_keys, plain
from hpctrain.config.identity import changeable
from hpctrain.config.rules import batch_sizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, EvaluationConfig, ParallelConfig
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


def fit_layout(config: Config, ranks: int, *, whole_outputs: bool = False) -> str:
    """Change `parallel` so that it fits, in place; return what has changed, for people, or "".

    With `whole_outputs` a rank must have whole outputs of the model, which the stages of a pipeline
    and the parts of a sequence (context parallel) do not have.
    """
    parallel = config.parallel
    divides = whole_outputs and (parallel.pp > 1 or parallel.cp > 1)
    try:
        Degrees.of(parallel, ranks)
    except ConfigError:
        pass
    else:
        if not divides:
            return ""
    before, tp = _named(parallel), parallel.tp if ranks % parallel.tp == 0 else 1
    dp = ranks // tp
    sharded = parallel.fsdp.offload or parallel.dp_shard not in (0, 1)
    sharded |= parallel.tp > tp or parallel.pp > 1 or parallel.cp > 1
    config.parallel = dataclasses.replace(
        parallel,
        dp_replicate=1 if sharded else dp,
        dp_shard=dp if sharded else 1,
        zero=3 if sharded else parallel.zero,
        fsdp=dataclasses.replace(parallel.fsdp, reshard_after_forward=None),
        tp=tp,
        ep=parallel.ep if dp % parallel.ep == 0 else 1,
        pp=1,
        cp=1,
    )
    return (
        f"the run was trained with {before}; {ranks} rank{'' if ranks == 1 else 's'} now: "
        f"{_named(config.parallel)} (KEY=VALUE chooses another layout)"
    )


def fit_batch(config: Config, degrees: Degrees) -> None:
    """Let the batch be one that these ranks can divide, in place; it does not change a result.

    There may be no such batch, which is a ConfigError.
    """
    train = config.train
    config.parallel.weights = None
    train.micro_batch_size, train.batch_size_ramp = None, []
    if degrees.pp == 1:
        train.accumulate = 1
    unit = degrees.dp * train.accumulate
    train.global_batch_size = -(-train.global_batch_size // unit) * unit
    if wrong := list(batch_sizes.problems(config, degrees)):
        raise ConfigError("\n".join(wrong))


def _named(parallel: ParallelConfig) -> str:
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    degrees = {name: getattr(parallel, name) for name in names}
    return " ".join(f"{name}={n}" for name, n in degrees.items() if n != 1) or "one rank"
