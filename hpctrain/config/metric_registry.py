"""Every metric that a run may have: its name, its unit and what it means, each of them once.

    SAMPLES_PER_S = _metric("perf/samples_per_s [samples/s]", "Samples of all ranks ...")
    tracker.log_metrics({SAMPLES_PER_S: 1234.5}, step)

Those of the sensors stand with them (`hpctrain.insight.monitor.metric_names`).
Words in capitals stand for what differs from run to run: `val/NAME`, `system/NODE/gpu_N_...`.
"""

from typing import NamedTuple, Self

from hpctrain.base import offered


class Metric(NamedTuple):
    """What is known of a metric."""

    name: str  # under which its values are logged
    unit: str  # "" for a number without one
    text: str  # what it means, in sentences

    @classmethod
    def of(cls, name_unit: str, text: str) -> Self:
        """Return a metric by its name, behind which its unit may stand in brackets."""
        name, _, unit = name_unit.removesuffix("]").partition(" [")
        return cls(name, unit, text)


_known: list[Metric] = []


def registered(group: str = "") -> list[Metric]:
    """Return the metrics of a group, what stands before the first `/`; "" means all groups."""
    known = [*_known, *offered.metric_names.METRICS] if group in ("", "system") else _known
    return [metric for metric in known if not group or metric.name.startswith(f"{group}/")]


def unit(name: str) -> str:
    """Return the unit of a metric; "" for a number without one, and for those of a user's task."""
    return next((metric.unit for metric in registered() if metric.name == name), "")


def _metric(name_unit: str, text: str) -> str:
    _known.append(Metric.of(name_unit, text))
    return _known[-1].name


TRAIN_LOSS = _metric(
    "train/loss",
    "The loss, the mean over the samples or tokens of all ranks since the last report.",
)
TRAIN_NAME = _metric(
    "train/NAME",
    "Another sum of the task divided by its count, over all ranks since the last report; or what "
    "the task derives from these means.",
)
LR = _metric("train/lr", "The learning rate of the step.")
GRAD_NORM = _metric(
    "train/grad_norm", "The L2 norm of the gradient of the step, of all ranks, before clipping."
)
EPOCH = _metric("train/epoch [epochs]", "The whole epochs that the training has been given.")
GLOBAL_BATCH_SIZE = _metric(
    "train/global_batch_size [samples]",
    "The samples of the step, of all ranks, where train.batch_size_ramp changes them.",
)
SKIPPED_STEPS = _metric(
    "train/skipped_steps [steps]",
    "The steps that were left out, because a number was not finite (train.nonfinite).",
)
_metric(
    "train/expert_load_max",
    "The tokens of the busiest expert, divided by those that each would have if all had equally "
    "many; the largest of all layers.",
)
_metric(
    "val/NAME",
    "A sum of the task divided by its count, over the evaluation split, each sample once; or what "
    "the task derives from these means.",
)
SAMPLES_PER_S = _metric(
    "perf/samples_per_s [samples/s]",
    "Samples of all ranks, divided by the time of the steps since the last report. Evaluations, "
    "checkpoints and reports do not count as time.",
)
TOKENS_PER_S = _metric(
    "perf/tokens_per_s [tokens/s]",
    "Predicted tokens of all ranks, divided by the same time; for a task that counts tokens.",
)
SAMPLES_SEEN = _metric(
    "perf/samples_seen [samples]",
    "Samples that the training has been given since step 0, over all ranks, epochs and attempts; "
    "what a resumed attempt makes again counts once.",
)
TOKENS_SEEN = _metric(
    "perf/tokens_seen [tokens]",
    "Predicted tokens of all steps since step 0, counted like the samples; for a task that counts "
    "tokens.",
)
STEP_MS_P50 = _metric(
    "perf/step_ms_p50 [ms]",
    "The median time of a step since the last report, from the end of the step before to its own "
    "end, with the wait for data. On a GPU it is measured by events in the stream of the training.",
)
STEP_MS_P95 = _metric("perf/step_ms_p95 [ms]", "The 95th percentile of the same times.")
STEP_MS_MAX = _metric("perf/step_ms_max [ms]", "The largest of the same times.")
DATA_WAIT_FRACTION = _metric(
    "perf/data_wait_fraction",
    "The part of the time of the steps in which rank 0 has waited for its data.",
)
COMMUNICATION_FRACTION = _metric(
    "perf/communication_fraction",
    "The part of the time of the steps in which rank 0 has waited for other ranks: communication "
    "that no work covers. It is measured on CPUs only, where a thread that waits sleeps; on a GPU "
    "only a profile shows it. A single rank has no such metric.",
)
CHECKPOINT_S = _metric(
    "perf/checkpoint_s [s]",
    "The time of the checkpoints since the last report; only where there was one.",
)
EVALUATION_S = _metric("perf/evaluation_s [s]", "The time of the evaluation of this step.")
MFU_PERCENT = _metric(
    "perf/mfu_percent [%]",
    "Model FLOPs utilisation (PaLM, appendix B): the operations that the model needs, as a part of "
    "the peak of all devices in the format that computes. Attention counts as a whole square. An "
    "unknown device or model has none, and neither has one of which a part is not trained.",
)
MEMORY_PEAK_GIB = _metric(
    "perf/memory_peak_gib [GiB]",
    "The most memory of a GPU that tensors have needed at a time so far; the largest of all ranks.",
)
MEMORY_RESERVED_GIB = _metric(
    "perf/memory_reserved_gib [GiB]",
    "The most memory of a GPU that torch has taken from the driver so far; the largest of all "
    "ranks.",
)
LOSS_SCALE = _metric("perf/loss_scale", "The factor of the loss; only with precision.compute=fp16.")
GPU_HOURS = _metric(
    "perf/gpu_hours [GPU h]",
    "The hours that all attempts have taken so far, times their GPUs; also what was lost counts.",
)
RUNG = _metric(
    "search/rung [rungs]",
    "The number of rungs of a search at which the trial has paused, logged at the step of each.",
)
_metric("best/NAME", "The value of the metric checkpoint.best, of the best checkpoint so far.")
_metric("best/step [steps]", "The step of the best checkpoint so far.")
