"""The schema of a run: names, types, units and defaults.

The dataclasses own every default; `conf/` holds choices and values only. A section with a
`_target_` (model, task, optimizer, transforms) takes anything importable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class WindowsConfig:
    """Samples of equal length, cut from a variable-length field: tokens."""

    field: str | None = None  # null: samples as they are stored
    length: int = 1025  # elements; for a language model its context + 1
    stride: int | None = None  # from one window to the next; null: length
    documents: bool = False  # give FIELD_document as well: which document each element is of


@dataclass
class ImagesConfig:
    """Images that are stored encoded (JPEG, PNG...) and decoded by threads as they are read."""

    field: str | None = None  # null: none
    size: list[int] | None = None  # height, width; null: that of the first
    fit: str = "exact"  # what is done to others: exact (refused) | crop | stretch
    channels: int = 3


@dataclass
class BucketsConfig:
    """Batches of samples of like length."""

    field: str | None = None  # variable-length field; null: no buckets
    window: int = 8192  # samples that are sorted by length at a time
    size: int | None = None  # samples that stay together; null: the global batch


@dataclass
class DataConfig:
    """Where the samples come from (`python -m data_prep` writes them), and in which order."""

    path: str = MISSING  # folder with index.json, or a URL of one (fsspec)
    train_split: str = "train"
    val_split: str | None = "val"  # null: no evaluation
    fields: list[str] | None = None  # those that are read; null: all
    windows: WindowsConfig = field(default_factory=WindowsConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    # Training draws from these in place of `path`: {name: ..., path: ..., weight: ..., split: ...}
    mixture: list[dict[str, Any]] = field(default_factory=list)
    temperature: float = 1.0  # without weights: they are count^(1/temperature)

    shuffle: str = "full"  # full | block (reads in runs) | none
    block_size: int | None = None  # samples of a run; null: from the shards' layout
    window: int = 64  # blocks that are mixed at a time
    lanes: int = 1  # parts of an order of blocks that ranks read apart: a multiple of their number
    subset: str | None = None  # of the training split: START:STOP:STEP, or indices in FILE.npy
    balance: str | None = None  # field of classes, of which each is drawn equally often
    weights: str | None = None  # field by whose values samples are drawn, with replacement
    buckets: BucketsConfig = field(default_factory=BucketsConfig)
    repeat: int = 1  # times that a sample comes in an epoch
    collate: str = "pad"  # variable-length fields: pad | pack (end to end, with offsets)
    tail: str = "drop"  # what becomes of an incomplete last batch: drop | pad (with a mask)

    # Lists of {_target_: ...}: see hpctrain.data.workers.samples and hpctrain.data.transforms.
    transforms: list[dict[str, Any]] = field(default_factory=list)  # of a sample, on the CPU
    batch_transforms: list[dict[str, Any]] = field(default_factory=list)  # on the device
    # In evaluation; null: those of training that are not random.
    val_transforms: list[dict[str, Any]] | None = None
    val_batch_transforms: list[dict[str, Any]] | None = None

    threads: int = 1  # that read ahead; 0: read when asked
    prefetch_mb: float = 64.0  # how much each rank reads ahead
    workers: int = 0  # processes that apply `transforms`; 0: the reading threads do
    # Copy shards to the node: none | node | auto (from network file systems) | sbcast (by Slurm).
    stage: str = "auto"
    stage_dir: str | None = None  # null: SLURM_TMPDIR, TMPDIR, /tmp or /dev/shm
    stage_gb: float | None = None  # that the copies on a node may take; null: half of the disk
    io: str = "auto"  # uncompressed shards: mmap | read | auto (read on network file systems)
    verify: str = "off"  # shards' digests: off | first_use | full (before the first step)


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
