"""The schema of a run: names, types, units and defaults.

    YAML and command line ── Hydra ── from_omegaconf() ── Config (typed) ── validate() ── freeze()
                                                           ▲
    config.yaml of a run directory ──── load() ────────────┘

The dataclasses own every default; `conf/` holds choices and values only. A section with a
`_target_` (model, task, optimizer) takes anything importable. No torch here: the login node
validates whole sweeps with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from hpctrain import secrets
from hpctrain.errors import ConfigError
from hpctrain.explain import explain, unknown_key


@dataclass
class DataConfig:
    """Where the samples come from (`python -m data_prep` writes them)."""

    path: str = MISSING  # folder with index.json
    train_split: str = "train"
    val_split: str | None = "val"  # null: no evaluation
    shuffle: bool = True
    tail: str = "drop"  # what becomes of an incomplete last batch: drop | pad (with a mask)
    threads: int = 1  # that read ahead; 0: read when asked
    prefetch_mb: float = 64.0  # how much each rank reads ahead


@dataclass
class OptimizerConfig:
    """Any torch optimizer; `options` are its other keyword arguments."""

    _target_: str = "torch.optim.AdamW"
    lr: float = 1e-3  # peak, after warm-up
    weight_decay: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SchedulerConfig:
    """Learning rate over the steps: linear warm-up, then `kind` down to `final_ratio` * lr."""

    kind: str = "cosine"  # constant | linear | cosine
    warmup_steps: int = 0
    final_ratio: float = 0.0


@dataclass
class TrainConfig:
    """How long, in which portions, and what is reported."""

    global_batch_size: int = 64  # samples a step, over all ranks
    accumulate: int = 1  # micro-batches a rank's share of the batch is split into
    max_epochs: int | None = None
    max_steps: int | None = None  # the smaller of the two ends the run
    clip_norm: float | None = 1.0  # of the global gradient (L2); null: no clipping
    log_every: int = 20  # steps
    eval_every: int | None = None  # steps; null: every epoch


@dataclass
class PrecisionConfig:
    """Parameters stay float32; `compute` is what matrix products run in."""

    compute: str = "fp32"  # fp32 | bf16


@dataclass
class ParallelConfig:
    """Degrees of parallelism: their product is the number of ranks."""

    dp: int = -1  # data parallel; -1: all ranks
    device: str = "auto"  # auto | cpu | cuda
    backend: str = "auto"  # auto | gloo | nccl
    timeout_s: int = 600  # of a collective


@dataclass
class CheckpointConfig:
    """Checkpoints are committed by rename; the newest that verifies is resumed."""

    every_steps: int = 200
    keep: int = 2  # older ones are removed; at least 2, so that one may be damaged


@dataclass
class TrackingConfig:
    """MLflow, by way of a journal in the run directory."""

    enabled: bool = True
    uri: str | None = None  # null: sqlite:///OUTPUT_DIR/mlflow.db
    experiment: str = "hpctrain"
    upload: bool = True  # false: only the journal; `hpctrain sync` uploads it later


@dataclass
class LaunchConfig:
    """What a job asks of the cluster, said once for every way of launching."""

    nodes: int = 1
    tasks_per_node: int = 1  # ranks a node
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem_gb: float | None = None  # a node; null: the cluster's default
    time_min: int = 60
    warn_s: int = 120  # how long before the time limit the job saves and requeues itself
    max_running: int | None = None  # jobs of one sweep at a time; null: what the cluster gives
    rerun: str = "failed"  # which runs are done again: failed | all (finished too) | none
    snapshot: str = "auto"  # run the jobs from a copy of the code: auto | git | off
    snapshot_max_mb: float = 50.0  # how much code may be copied
    wait: bool = False  # wait for the jobs and return the metric (for sweepers such as Optuna)
    check: bool = False  # ask the scheduler first whether, and when, it would run the jobs
    dry_run: bool = False  # print the sbatch script and stop


@dataclass
class ContainerConfig:
    """The image that the ranks run in; the batch script stays outside, with Slurm's commands."""

    runtime: str | None = None  # apptainer | singularity | pyxis (srun's plugin); null: none
    image: str | None = None  # FILE.sif, docker://..., or a name that enroot knows
    python: str = "python"  # inside the image
    binds: list[str] = field(default_factory=list)  # FROM[:TO[:OPTIONS]]; the run's folders are
    nv: bool | None = None  # apptainer's --nv; null: when the job has GPUs
    args: list[str] = field(default_factory=list)  # more for `apptainer exec`; pyxis: for srun


@dataclass
class SiteConfig:
    """A cluster's ways: conf/site/example.yaml says which line cures which complaint."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None  # node features
    reservation: str | None = None
    licenses: str | None = None
    memory_option: str = "mem"  # says launch.mem_gb: mem | mem-per-cpu | mem-per-gpu | none
    gpu_option: str = "gpus-per-node"  # says launch.gpus_per_node: or gres | gpus-per-task | none
    gpu_type: str | None = None  # a100: asks for gpu:a100:4 (gres) or a100:4
    mail_user: str | None = None
    mail_type: str | None = None  # FAIL,TIME_LIMIT...; ARRAY_TASKS: a mail for each run
    login_shell: bool = False  # the job's script runs in `bash -l`
    modules: list[str] = field(default_factory=list)  # module load these; first of all
    env: dict[str, str] = field(default_factory=dict)  # exported in the job
    setup: list[str] = field(default_factory=list)  # shell commands before srun; a failure ends it
    teardown: list[str] = field(default_factory=list)  # after srun, however that ended
    cpu_bind: str | None = None  # srun's: cores | none | ...
    kill_on_bad_exit: bool = True  # a rank that fails ends the others
    sbatch: dict[str, Any] = field(default_factory=dict)  # any other sbatch option
    srun: list[str] = field(default_factory=list)  # further srun arguments
    container: ContainerConfig = field(default_factory=ContainerConfig)


@dataclass
class Config:
    """One training run."""

    name: str = "run"  # the run directory's name begins with it
    seed: int = 0
    output_dir: str = "runs"
    metric: str = "val/accuracy"  # what a sweeper gets
    model: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    site: SiteConfig = field(default_factory=SiteConfig)

    @property
    def asked_world_size(self) -> int:
        """Ranks that `launch` asks for."""
        return self.launch.nodes * self.launch.tasks_per_node


# What decides neither the samples nor the mathematics is not part of a run's identity.
# `data.path` is replaced by the data set's digest: a copy elsewhere is the same data.
NOT_IN_SIGNATURE = (
    "name", "output_dir", "metric", "parallel", "checkpoint", "tracking", "launch", "site",
    "data.path", "data.threads", "data.prefetch_mb", "train.log_every",
)  # fmt: skip


def from_omegaconf(node: DictConfig) -> Config:
    """Turn Hydra's composed config, or a frozen one, into the typed one, with absolute paths.

    Args:
        node: a `hydra` key is ignored.

    Raises:
        ConfigError: a key is unknown, a mandatory value is missing, or an interpolation does not
            resolve.
    """
    try:
        if "hydra" in node:
            node = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
        # Hydra composes into the schema, so its sections have their types; a file's have none.
        if OmegaConf.get_type(node, "launch") is not LaunchConfig:
            plain = OmegaConf.to_container(node)
            node = DictConfig(OmegaConf.merge(OmegaConf.structured(Config), plain))
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        missing = min(OmegaConf.missing_keys(node))
        raise ConfigError(
            f"{missing} is missing: give {missing}=VALUE, or choose an experiment=NAME "
            "that does (python -m hpctrain --help lists them)"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, known_keys())) from error
    # Every value has its type from the schema by now; `+train.typo=1` got past it.
    config: Config = _typed(Config, values)
    config.output_dir = os.path.abspath(os.path.expanduser(config.output_dir))
    config.data.path = os.path.abspath(os.path.expanduser(config.data.path))
    if config.tracking.uri is None:
        config.tracking.uri = f"sqlite:///{config.output_dir}/mlflow.db"
    return config


def _typed(schema: Any, values: Any, prefix: str = "") -> Any:
    """A dataclass of plain values; OmegaConf's own way takes ten times as long."""
    members = {member.name: member.default_factory for member in fields(schema)}
    for name in values.keys() - members.keys():
        raise ConfigError(unknown_key(f"{prefix}{name}", list(known_keys())))
    given = {}
    for name, value in values.items():
        section: Any = members[name]
        inner = f"{prefix}{name}."
        given[name] = _typed(section, value, inner) if is_dataclass(section) else value
    return schema(**given)


def load(path: Path) -> Config:
    """Read a frozen config.yaml.

    Raises:
        ConfigError: unreadable, or it does not fit the schema.
    """
    try:
        node = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as a frozen config ({said})") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{path}: cannot be read as a frozen config (it has no keys)")
    try:
        return from_omegaconf(node)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def dump(config: Config) -> str:
    """The frozen config as YAML, every value resolved but the secrets of the environment."""
    text: str = yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes what `OmegaConf.load` reads back unchanged; its own dumper is 15 times slower."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.secrets = secrets.known()

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        """Mark the keys, which OmegaConf reads as they are."""
        marked = {_Key(k) if isinstance(k, str) else k: value for k, value in mapping.items()}
        return super().represent_mapping(tag, marked, flow_style)


class _Key(str):
    pass


def _escape(text: str) -> str:
    # `${` in a resolved value is no interpolation.
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", text)


def _as_yaml(dumper: Any, text: str) -> Any:
    escape = str if isinstance(text, _Key) else _escape
    escaped = secrets.reference(text, escape, dumper.secrets)
    # 1e-3 is a number to OmegaConf, not to YAML.
    style = '"' if re.fullmatch(r"[-+.\d].*|nan|inf", text, re.I | re.S) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", escaped, style=style)


_Dumper.add_representer(str, _as_yaml)
_Dumper.add_representer(_Key, _as_yaml)


def plain(section: Any) -> dict[str, Any]:
    """The sections as dicts, their values shared; `dataclasses.asdict` copies each in depth."""
    return {
        name: plain(value) if is_dataclass(value) else value
        for name, value in vars(section).items()
    }


def identity(config: Config, data_digest: str) -> dict[str, Any]:
    """The part of a config that decides the result; its hash names the run."""
    content = plain(config)
    for key in NOT_IN_SIGNATURE:
        *sections, last = key.split(".")
        node = content
        for section in sections:
            node = node[section]
        del node[last]
    return {**_without_secrets(content, secrets.known()), "data_digest": data_digest}


def _without_secrets(node: Any, values: Mapping[str, str]) -> Any:
    """A token that is renewed does not make it another run."""
    if isinstance(node, dict):
        return {key: _without_secrets(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_secrets(value, values) for value in node]
    return secrets.reference(node, values=values) if isinstance(node, str) else node


def known_keys(node: Any = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections before their members."""
    for member in fields(node):
        yield prefix + member.name
        section: Any = member.default_factory
        if is_dataclass(section):
            yield from known_keys(section, f"{prefix}{member.name}.")
