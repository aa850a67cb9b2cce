"""The keys of `train`, with those of its adapters (LoRA) and of what replicas send each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import TOO_LARGE, key, section


def _check_patterns(patterns: Any) -> str:
    texts = patterns if isinstance(patterns, list) else [patterns]
    fits = patterns is None or (texts and all(isinstance(text, str) and text for text in texts))
    return "" if fits else "it must be a pattern, a list of patterns, or null"


@dataclass
class LoRAConfig:
    """Only small matrices beside chosen linear layers are trained (LoRA, Hu et al. 2021).

    The weights of the model are those of checkpoint.init_from, which are not changed or saved.
    """

    match: Any = key(
        None,
        "Linear layers whose names fit one of these patterns get an adapter: one pattern, or a "
        "list. A * stands for any text. Null trains the model itself.",
        check=_check_patterns,
    )
    rank: int = key(8, "Adapters have this rank.", at_least=1)
    alpha: float = key(16.0, "What an adapter adds is multiplied by alpha / rank.", above=0)
    dropout: float = key(
        0.0,
        "In training, inputs of adapters are zeroed with this probability.",
        at_least=0,
        below=1,
    )
    also: list[str] = key(
        [],
        "Parameters whose names fit one of these patterns are trained and saved as well, such as "
        "those of a new head.",
    )
    quantize: str | None = key(
        None,
        "nf4: the frozen weights of the matched layers are held in 4 bits (QLoRA), by "
        "bitsandbytes. For one process and DDP. Null holds them as they are.",
        choices=(None, "nf4"),
    )

    @property
    def patterns(self) -> list[str]:
        """The patterns of `match`; none without LoRA."""
        return [self.match] if isinstance(self.match, str) else list(self.match or [])


@dataclass
class CompressionConfig:
    """Gradients are compressed before DDP sends them; with one rank it has no effect."""

    kind: str = key(
        "none",
        "powersgd sends matrices of a low rank, and adds what it left out to the next gradient.",
        choices=("none", "powersgd"),
    )
    rank: int = key(4, "powersgd sends two matrices of this rank for each.", at_least=1)


@dataclass
class _LocalSGDConfig:
    """DDP replicas train by themselves and are averaged now and then, for slow connections.

    With one rank it has no effect.
    """

    every: int | None = key(
        None,
        "The parameters of the replicas are averaged after this many steps, and after the last "
        "step of the run. Until then, evaluations and clipping see each rank's own replica. Null "
        "reduces the gradients of each step.",
        count="steps",
    )
    outer_lr: float = key(
        1.0,
        "The common parameters move by this factor times the mean change of the replicas. 1 "
        "without momentum averages the replicas; DiLoCo takes 0.7.",
        above=0,
    )
    outer_momentum: float = key(
        0.0, "The Nesterov momentum of the mean changes. DiLoCo takes 0.9.", at_least=0, at_most=1
    )


def _check_ramp(stages: list[dict[str, Any]]) -> str:
    """Return what is wrong with the form of train.batch_size_ramp, or ""."""
    for stage in stages:
        lengths = [name for name in ("steps", "samples") if name in stage]
        names = {"global_batch_size", *lengths[:1]}
        numbers = [type(value) is int and 0 < value < TOO_LARGE for value in stage.values()]
        if {*stage} != names or len(lengths) != 1 or not all(numbers):
            return (
                f"{stage} is no stage: it must have global_batch_size, and either steps or "
                "samples, which are numbers of at least 1"
            )
    return ""


def _check_profile(steps: str | None) -> str:
    found = re.fullmatch(r"([0-9]{1,12})-([0-9]{1,12})", steps) if steps is not None else None
    if steps is not None and found is None:
        return "it must be a range of steps, such as 10-15"
    if found is None or 2 <= int(found[1]) <= int(found[2]) < int(found[1]) + 100:
        return ""
    return "it must begin at step 2 or later, not end before that, and have at most 100 steps"


@dataclass
class _EarlyStoppingConfig:
    """The run ends early, as finished, when a metric does not get better any more."""

    metric: str | None = key(
        None, "This metric decides, such as val/loss. Null means no early stopping."
    )
    patience: int = key(
        5,
        "So many values in a row that are not better end the run: val/NAME has one for each "
        "evaluation, train/NAME one for each train.log_every steps.",
        at_least=1,
    )
    min_delta: float = key(
        0.0, "A value is better only if it is better by more than this.", at_least=0
    )


@dataclass
class TrainConfig:
    """The length of a run, its batches, its reports, and what happens in a step."""

    global_batch_size: int = key(
        64, "A step processes this many samples, over all ranks.", count="samples"
    )
    batch_size_ramp: list[dict[str, Any]] = key(
        [],
        "The run begins with smaller batches. A stage is {global_batch_size: 16, steps: 100}, or "
        "{global_batch_size: 16, samples: 1600}, whose last step may pass that number. The sizes "
        "grow, and after the stages comes train.global_batch_size.",
        check=_check_ramp,
    )
    accumulate: int = key(
        1,
        "Each rank splits its share of the batch into this many micro-batches: less memory, the "
        "same gradient.",
        unit="micro-batches",
        at_least=1,
        identity=False,
    )
    micro_batch_size: str | None = key(
        None,
        "Each rank processes this many samples at a time, in place of train.accumulate. auto "
        "measures the memory of the GPU in the first steps and takes the largest that fits.",
        unit="samples",
        pattern=(r"auto|0*[1-9]\d*", "it must be a number of samples, at least 1, or auto"),
        identity=False,
    )
    activation_checkpointing: str = key(
        "none",
        "Blocks keep all activations for the backward pass (none), only their inputs (full), or "
        "the results of matrix products and attention (selective); the rest is computed again.",
        choices=("none", "full", "selective"),
        identity=False,
    )
    compile: str = key(
        "off",
        "torch.compile translates the whole model (model), or each block (blocks), which takes "
        "less time because blocks are alike.",
        choices=("off", "blocks", "model"),
        identity=False,
    )
    deterministic: bool = key(
        False,
        "GPUs use only algorithms that add in a fixed order, so that a run that is repeated on the "
        "same GPUs, layout and software gives the same bits. Steps take longer, and an operation "
        "that has no such algorithm ends the run with an error.",
        identity=False,
    )
    sync_batchnorm: bool = key(
        False,
        "Batch norms take the mean and the variance of a micro-batch from all data-parallel ranks, "
        "so that without accumulation every loss is that of one process. Several micro-batches "
        "have statistics of their own in any case: those of the whole batch are known only after "
        "all of them have passed the layers before. With false, each rank has its own statistics.",
    )
    max_epochs: int | None = key(
        None, "The run ends after this many epochs. Null means no limit.", count="epochs"
    )
    max_steps: int | None = key(
        None,
        "The run ends after this many steps. Null means no limit; with max_epochs, the smaller of "
        "the two ends it.",
        count="steps",
    )
    clip_norm: float | None = key(
        1.0, "The global gradient is clipped to this L2 norm. Null does not clip.", above=0
    )
    nonfinite: str = key(
        "stop",
        "What happens when the loss or the gradient of a step is NaN or infinite. Its update is "
        "never kept. stop ends the run as failed. skip goes on without the update. rollback goes "
        "back to the newest healthy checkpoint and leaves the batch out. fp16 first lowers its "
        "loss scale.",
        choices=("stop", "skip", "rollback"),
        identity=False,
    )
    watch: str = key(
        "note",
        "What happens when all numbers are finite, but the loss has diverged. note says so in the "
        "log, status, MLflow and to trackers. stop also ends the run as failed. off does not look.",
        choices=("note", "stop", "off"),
        identity=False,
    )
    log_every: int | None = key(
        None,
        "Metrics are reported every this many steps. Null means 200, or a tenth of a shorter run. "
        "A report takes about 0.25 ms, so a run whose steps take seconds can afford one every 10.",
        count="steps",
        identity=False,
    )
    eval_every: int | None = key(
        None,
        "The model is evaluated every this many steps. Null means after every epoch.",
        count="steps",
    )
    early_stopping: _EarlyStoppingConfig = section(_EarlyStoppingConfig)
    ema: float | None = key(
        None,
        "Beside the parameters the run keeps their exponential moving average, which keeps this "
        "part of itself in each step, such as 0.999. Null keeps none.",
        above=0,
        below=1,
    )
    profile: str | None = key(
        None,
        "torch's profiler records these steps, such as 10-15, into the folder profile of the run. "
        "A run that ends or resumes inside of the range has no trace. Null records none.",
        unit="steps",
        check=_check_profile,
        identity=False,
    )
    from_scratch: bool = key(
        False,
        "If the checkpoints of a run are gone, or are of another model or of other code than that "
        "of now, its directory is kept under another name and a new run starts at step 0. With "
        "false a run without its checkpoints, or of another model, is refused, and one of other "
        "code goes on with a warning. A run that has checkpoints of the code as it is resumes.",
        identity=False,
    )
    lora: LoRAConfig = section(LoRAConfig)
    compression: CompressionConfig = section(CompressionConfig)
    local_sgd: _LocalSGDConfig = section(_LocalSGDConfig)
