"""What a job asks for and does not need: for `report`, `status`, and a submission like the last."""

import functools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from heapq import nlargest
from itertools import chain
from pathlib import Path
from typing import Any

from hpctrain.base.errors import ConfigError, HpctrainError
from hpctrain.base.names.run_record import RunRecord
from hpctrain.config.frozen import plain, values_of
from hpctrain.config.schema import Config
from hpctrain.insight.estimates import site_rules
from hpctrain.insight.estimates.advice import CORES_PER_GPU, HOST_GB_PER_GPU
from hpctrain.insight.estimates.usage import Usage

_MOST_NODES = 16  # whose samples the end of a run waits for
_MOST_RUNS = 50  # the newest of `output_dir`
# What decides the use of a node, and then the length of a run.
_SHAPE = (
    *("model", "task._target_", "data.windows", "data.images.size", "precision.compute"),
    *("train.global_batch_size", "train.compile", "train.activation_checkpointing"),
    *("optimizer._target_", "launch.nodes", "launch.tasks_per_node", "launch.gpus_per_node"),
    *("site.partition", "parallel"),
)
_LENGTH = ("train.max_steps", "train.max_epochs", "data.path")
_ROOM = 1.25  # what a request should have above the highest use


def _too_much(
    launch: Mapping[str, Any], used: float | None, load: float | None, minutes: float | None
) -> Iterator[str]:
    """Yield what was used of a request, each with the key: GiB, percent of the cores, minutes."""
    gpus, asked = int(launch.get("gpus_per_node") or 0), launch.get("mem_gb") or 0
    if used is not None and used < asked / 2:
        least = max(1, HOST_GB_PER_GPU * gpus, math.ceil(_ROOM * used))
        if least < asked:
            yield f"{used:.1f} GiB of {asked:g} GiB of memory used: `launch.mem_gb={least}`"
    cores = int(launch.get("cpus_per_task") or 1)
    if load is not None and load < 50:
        of_gpus = math.ceil(CORES_PER_GPU * gpus / int(launch.get("tasks_per_node") or 1))
        need = max(1, of_gpus, math.ceil(_ROOM * load / 100 * cores))
        if need < cores:
            yield f"{load:.0f}% of the cores used: `launch.cpus_per_task={need}`"
    given = launch.get("time_min")
    limit = given if isinstance(given, int) else 0
    warning = int(launch.get("warn_s") or 0) // 60 + 1  # a job saves so long before its limit
    if minutes is not None and minutes < limit / 2:
        needed = max(1, math.ceil(_ROOM * minutes)) + warning
        if needed < limit:
            yield (
                f"{minutes:.0f} of {limit} minutes used: `launch.time_min={needed}` lets Slurm "
                "start the job earlier"
            )


def of_sweep(configs: Iterable[Config]) -> Iterator[str]:
    """Yield once, in a line, what the last runs of the same shape have left unused of a request."""
    kinds = {(_chosen(each, (*_SHAPE, *_LENGTH, "launch"))): each for each in configs}
    yield from dict.fromkeys(filter(None, map(_left_unused, map(plain, kinds.values()))))


def of_job(
    usage: Usage, launch: Mapping[str, Any], rules: str | None, minutes: float | None
) -> tuple[list[str], list[str]]:
    """Return what the site says of a job, by the file of its rules, and what the job did not need.

    `minutes` is how long it took; None if that says nothing.
    """
    used, load = usage.host_gib(), usage.mean("cpu_utilization_percentage")
    limit = launch.get("time_min")
    known = {
        "idle_job": usage.idle_minutes(),
        "idle_gpus": usage.idle_part(),
        "cores": 100 / load if load else None,
        "memory": (launch.get("mem_gb") or 0) / used if used else None,
        "time_limit": limit / minutes if minutes and isinstance(limit, int) else None,
    }
    try:
        said = [*site_rules.broken(site_rules.read(rules), known)]
    except ConfigError as error:
        return [str(error)], []
    return said, [*_too_much(launch, used, load, minutes)]


def unused(run: Path) -> str:
    """Return the same of a run that finishes now.

    "" of many nodes, for which `report` has the time, and where `launch` is not what the job has
    asked for: a script of one's own, runs that share a job, trials.
    """
    with suppress(HpctrainError, OSError):
        values, record = values_of(run / "config.yaml"), RunRecord.of(run)
        own = record.submission is not None and not (record.shares_job or record.by_worker)
        if not own or record.attempt.nodes > _MOST_NODES:
            return ""
        now, jobs = time.time(), Counter[tuple[str, int]]()
        for one in record.attempts:  # each requeue has the whole limit anew
            jobs[one.job_id, one.restart_count] += int((one.ended or one.seen or now) - one.started)
        launch, rules = values.get("launch", {}), values.get("site", {}).get("rules")
        return "; ".join(chain(*of_job(Usage.read(run), launch, rules, max(jobs.values()) / 60)))
    return ""


def _left_unused(asked: Mapping[str, Any]) -> str:
    if (run := _last_run(asked["output_dir"], _chosen(asked, _SHAPE))) is None:
        return ""
    same_length = _chosen(asked, _LENGTH) == _chosen(values_of(run / "config.yaml"), _LENGTH)
    spans = [(one.ended or one.started) - one.started for one in RunRecord.of(run).attempts]
    minutes = sum(spans) / 60 if same_length else None
    usage = Usage.read(run)
    used, load = usage.host_gib(), usage.mean("cpu_utilization_percentage")
    found = "; ".join(_too_much(asked["launch"], used, load, minutes))
    return f"{run.name}, the last run like this one: {found}" if found else ""


def _last_run(output_dir: str, shape: str) -> Path | None:
    """Return the newest run of a folder that has finished and has this shape."""
    files = nlargest(_MOST_RUNS, Path(output_dir).glob("*/run.json"), key=_changed)
    return next((file.parent for file in files if _shape_of(file.parent) == shape), None)


@functools.lru_cache(maxsize=256)
def _shape_of(run: Path) -> str:
    """Return the shape of a run that has finished; "" of others."""
    with suppress(HpctrainError, OSError):  # it is damaged, or somebody deletes it
        if RunRecord.of(run).state == "finished":
            return _chosen(values_of(run / "config.yaml"), _SHAPE)
    return ""


def _changed(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _chosen(values: Config | Mapping[str, Any], names: Iterable[str]) -> str:
    """Return these values of a config as a text that can be compared."""
    found = []
    for name in names:
        value: Any = values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        found.append(value)
    return repr(found)


def waste(run: Path, since: float, now: float) -> str:
    """Return which GPUs of a run are idle now, in the site's words if it has rules; "" if none.

    Its monitor has told so `since` then; only the ends of the samples are read.
    """
    usage = Usage.read(run, tail=True)
    part = usage.idle_part(share=1.0)
    if not part:
        return ""
    try:
        values = values_of(run / "config.yaml")
        rules = site_rules.read(values.get("site", {}).get("rules"))
    except ConfigError:  # `doctor` says what is wrong
        values, rules = {}, {}
    minutes = (now - since) / 60 + values.get("monitor", {}).get("idle_minutes", 0)
    known = {"idle_gpus": part, "idle_job": minutes if part == 1 else None}
    count = len(usage.gpus)
    said = f"{round(part * count)} of {count} GPUs idle for {minutes:.0f} minutes"
    return "; ".join([said, *site_rules.broken(rules, known)])
