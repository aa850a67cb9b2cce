"""The metrics of the sensors, below `system/`: the names, units and meanings of all of them."""

from hpctrain.config.metric_registry import Metric

METRICS: list[Metric] = []


def _metric(name_unit: str, text: str) -> None:
    METRICS.append(Metric.of(f"system/NODE/{name_unit}", text))


_metric(
    "cpu_utilization_percentage [%]",
    "The use of the cores of the job on this node: 100 means that all of them were busy.",
)
_metric(
    "system_memory_usage_megabytes [MB]",
    "The memory of the job on this node, without the cache of files.",
)
_metric(
    "system_memory_usage_percentage [%]",
    "The same, as a part of the limit of the job; of the node's memory if the job has no limit.",
)
for _name, _text in (
    ("utilization_percentage [%]", "The time in which something ran on this GPU of the job."),
    ("memory_usage_megabytes [MB]", "The memory in use of this GPU, or MIG instance."),
    ("memory_usage_percentage [%]", "The same, as a part of its memory."),
    ("power_usage_watts [W]", "Its power."),
    ("power_usage_percentage [%]", "The same, as a part of the limit that is set for it."),
    ("energy_joules [J]", "Its energy since the run began, over all attempts on this node."),
    ("temperature_celsius [°C]", "Its temperature."),
    ("clock_megahertz [MHz]", "The clock of its multiprocessors."),
    ("throttled_by_heat", "1 while its clock is lowered because it is too hot, else 0."),
    ("throttled_by_power", "1 while its clock is lowered by its limit of power, else 0."),
    ("ecc_corrected_errors [errors]", "Errors of its memory that were corrected since its start."),
    ("ecc_uncorrected_errors [errors]", "Errors that could not be corrected, since its start."),
):
    _metric(f"gpu_N_{_name}", _text)
