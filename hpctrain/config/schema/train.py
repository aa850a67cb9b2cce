"""The keys of `train`, `precision` and `checkpoint`."""

# ruff: noqa: RUF009 (`key` and `section` return dataclass fields)
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import TOO_LARGE, key, section


def _check_ratio(ratio: float | None) -> str:
    return "" if ratio is None or 0 < ratio <= 1 else "it must be greater than 0 and at most 1"


@dataclass
class CompressionConfig:
    """Gradients are compressed before DDP sends them; with one rank it has no effect."""

    kind: str = key(
        "none",
        "powersgd sends matrices of a low rank, topk the largest elements, int8 integers of 8 "
        "bits, onebit the signs. All but int8 add to the next gradient what they did not send.",
        choices=("none", "powersgd", "topk", "int8", "onebit"),
    )
    start_step: int = key(
        0, "Until this many steps are made, gradients are sent whole.", unit="steps", at_least=0
    )
    rank: int = key(4, "powersgd sends two matrices of this rank for each.", at_least=1)
    ratio: float = key(
        0.01, "topk sends this part of the elements of each parameter.", check=_check_ratio
    )
    final_ratio: float | None = key(
        None,
        "The ratio of topk changes from ratio to final_ratio, by the same factor in each step. "
        "Null keeps ratio.",
        check=_check_ratio,
    )
    ratio_steps: int = key(
        1000,
        "final_ratio is reached this many steps after start_step.",
        unit="steps",
        at_least=1,
    )


@dataclass
class LocalSGDConfig:
    """DDP replicas train by themselves and are averaged now and then, for slow connections.

    With one rank it has no effect.
    """

    every: int | None = key(
        None,
        "The parameters of the replicas are averaged after this many steps, and after the last "
        "step of the run. Until then, evaluations and clipping see each rank's own replica. Null "
        "reduces the gradients of each step.",
        unit="steps",
        at_least=1,
    )
    start_step: int = key(
        0,
        "Until this many steps are made, the gradients of each step are reduced (post-local SGD).",
        unit="steps",
        at_least=0,
    )
    outer_lr: float = key(
        1.0,
        "The common parameters move by this factor times the mean change of the replicas. 1 "
        "without momentum averages the replicas; DiLoCo takes 0.7.",
        above=0,
    )
    outer_momentum: float = key(
        0.0,
        "The Nesterov momentum of the mean changes. DiLoCo takes 0.9.",
        between=(0, 1),
    )


def _check_ema(decay: float | None) -> str:
    return "" if decay is None or 0 < decay < 1 else "it must be greater than 0 and less than 1"


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
        between=(0, 0.999),
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


def _check_micro_batch_size(size: str | None) -> str:
    if size is None or size == "auto" or (size.isdecimal() and int(size) > 0):
        return ""
    return "it must be a number of samples, at least 1, or auto"


@dataclass
class EarlyStoppingConfig:
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
    mode: str | None = key(
        None,
        "Lower values are better (min), or higher ones (max). Null takes it from the name.",
        choices=(None, "min", "max"),
    )
    min_delta: float = key(
        0.0, "A value is better only if it is better by more than this.", at_least=0
    )


def _check_profile(steps: str | None) -> str:
    found = re.fullmatch(r"([0-9]{1,12})-([0-9]{1,12})", steps) if steps is not None else None
    if steps is not None and found is None:
        return "it must be a range of steps, such as 10-15"
    if found is None or 2 <= int(found[1]) <= int(found[2]) < int(found[1]) + 100:
        return ""
    return "it must begin at step 2 or later, not end before that, and have at most 100 steps"


@dataclass
class TrainConfig:
    """The length of a run, its batches, its reports, and what happens in a step."""

    global_batch_size: int = key(
        64, "A step processes this many samples, over all ranks.", unit="samples", at_least=1
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
        check=_check_micro_batch_size,
        identity=False,
    )
    activation_checkpointing: str = key(
        "none",
        "Blocks keep all activations for the backward pass (none), only their inputs (full), or "
        "the results of matrix products and attention (selective); the rest is computed again.",
        choices=("none", "full", "selective"),
        identity=False,
    )
    activation_checkpointing_every: int = key(
        1,
        "Of this many successive blocks, activation_checkpointing applies to the first.",
        unit="blocks",
        at_least=1,
        identity=False,
    )
    compile: str = key(
        "off",
        "torch.compile translates the whole model (model), or each block (blocks), which takes "
        "less time because blocks are alike.",
        choices=("off", "blocks", "model"),
        identity=False,
    )
    expandable_segments: bool = key(
        False,
        "torch's memory on a GPU grows in place, so that less of it is lost in gaps "
        "(PYTORCH_ALLOC_CONF=expandable_segments:True).",
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
        None, "The run ends after this many epochs. Null means no limit.", unit="epochs", at_least=1
    )
    max_steps: int | None = key(
        None,
        "The run ends after this many steps. Null means no limit; with max_epochs, the smaller of "
        "the two ends it.",
        unit="steps",
        at_least=1,
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
    nonfinite_budget: int = key(
        10,
        "skip and rollback leave out at most this many steps of nonfinite_window, then the run "
        "fails.",
        unit="steps",
        at_least=1,
        identity=False,
    )
    nonfinite_window: int = key(
        1000,
        "nonfinite_budget counts the steps that were left out within this many steps.",
        unit="steps",
        at_least=1,
        identity=False,
    )
    watch: str = key(
        "note",
        "What happens when all numbers are finite, but the run seems to learn nothing: its loss "
        "has diverged, had a spike or does not fall, layers get a gradient of exactly zero, an "
        "evaluation is no better than a guess. note says so in the log, status, MLflow and an "
        "alert. stop also ends the run as failed, but not because of a spike. off does not look.",
        choices=("note", "stop", "off"),
        identity=False,
    )
    log_every: int = key(
        200,
        "Metrics are reported every this many steps. A report takes about 0.25 ms, so a run whose "
        "steps take seconds can afford one every 10.",
        unit="steps",
        at_least=1,
        identity=False,
    )
    eval_every: int | None = key(
        None,
        "The model is evaluated every this many steps. Null means after every epoch, or with "
        "eval_every_s not by steps.",
        unit="steps",
        at_least=1,
    )
    eval_every_s: float | None = key(
        None,
        "The model is evaluated when this much time has passed since the last evaluation, by the "
        "clock of rank 0. With eval_every both ask for evaluations. Null does not look at the "
        "time.",
        unit="seconds",
        above=0,
    )
    early_stopping: EarlyStoppingConfig = section(EarlyStoppingConfig)
    ema: float | None = key(
        None,
        "Beside the parameters the run keeps their exponential moving average, which keeps this "
        "part of itself in each step, such as 0.999. Null keeps none.",
        check=_check_ema,
    )
    ema_evaluation: bool = key(
        True, "With train.ema, evaluations use the average in place of the parameters."
    )
    sample_prompt: str | None = key(
        None,
        "At the end of the run rank 0 prints how the language model continues this text. The whole "
        "model must fit into its memory. Null prints nothing.",
        identity=False,
    )
    histograms_every: int | None = key(
        None,
        "Histograms of the gradients (before clipping) and of the parameters are recorded every "
        "this many steps. Null records none.",
        unit="steps",
        at_least=1,
        identity=False,
    )
    profile: str | None = key(
        None,
        "torch's profiler records these steps, such as 10-15, into the folder profile of the run. "
        "A run that ends or resumes inside of the range has no trace. Null records none.",
        unit="steps",
        check=_check_profile,
        identity=False,
    )
    profile_ranks: list[int] = key([0], "These ranks are recorded.", unit="ranks", identity=False)
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
    local_sgd: LocalSGDConfig = section(LocalSGDConfig)


@dataclass
class PrecisionConfig:
    """The number formats of the computation, the parameters and the gradient reduction."""

    compute: str = key(
        "fp32",
        "Matrix products are computed in this format. bf16 and fp16 are torch's autocast, and fp16 "
        "scales the loss. tf32 needs a GPU of compute capability 8.0, fp8 one of 8.9 and torchao.",
        choices=("fp32", "tf32", "bf16", "fp16", "fp8"),
    )
    params: str = key(
        "fp32",
        "Parameters, their gradients and the optimizer state are stored in this format.",
        choices=("fp32", "bf16"),
    )
    reduce: str | None = key(
        None,
        "Gradients are added over the ranks in this format. Null means the format of the "
        "parameters.",
        choices=(None, "fp32", "bf16", "fp16"),
    )


@dataclass
class CheckpointConfig:
    """Checkpoints: a run resumes from the newest that is not damaged."""

    init_from: str | None = key(
        None,
        "The first attempt of the run starts from these weights: a run, one of its checkpoints, a "
        ".safetensors file, or a folder of Hugging Face. A run that has a checkpoint of its own "
        "resumes from that. Null starts from the initial values of the model.",
        identity=False,
    )
    init_digest: str | None = key(
        None,
        "The digest of the weights in init_from; it is part of the run's name, and no other "
        "weights are loaded. Null is filled in when the run is asked for.",
    )
    init_rename: list[dict[str, Any]] = key(
        [],
        "Names in init_from get the names of the model: the first {match: PATTERN, to: NAME} that "
        "fits. Each * stands for any text, and those of `to` for what those of `match` have found.",
    )
    init_skip: list[str] = key(
        [],
        "Weights whose names fit one of these patterns are not loaded, such as a head of another "
        "shape: those of the model keep their initial values. Stored weights that the model does "
        "not have must be named here. A * stands for any text.",
    )
    branch_digest: str | None = key(
        None,
        "The run goes on from the checkpoint of another run with this digest. The command `branch` "
        "fills it in.",
    )
    every_steps: int = key(
        200,
        "A checkpoint is written every this many steps.",
        unit="steps",
        at_least=1,
        identity=False,
    )
    at_end: bool = key(
        True,
        "The last step of the run saves a checkpoint. With false the run leaves no weights behind "
        "beyond those of every_steps and best, for runs that only measure.",
        identity=False,
    )
    keep: int = key(
        2,
        "This many checkpoints are kept, older ones are removed. It is at least 2, because the "
        "newest may be damaged.",
        unit="checkpoints",
        at_least=2,
        identity=False,
    )
    keep_every: int | None = key(
        None,
        "The checkpoints of each multiple of this step are kept as well.",
        unit="steps",
        at_least=1,
        identity=False,
    )
    best: str | None = key(
        None,
        "An evaluation in which this metric is better than ever before, such as val/loss, saves a "
        "checkpoint, which is kept and marked as the best. Null keeps no best checkpoint.",
        identity=False,
    )
    best_mode: str | None = key(
        None,
        "Lower values of best are better (min), or higher ones (max). Null takes it from the name.",
        choices=(None, "min", "max"),
        identity=False,
    )
