"""Notes on a run, in the manner of jobstats: what was used badly, and the override to change."""

import math
from collections.abc import Iterator

from omegaconf import OmegaConf

from hpctrain.config.advice import CORES_PER_GPU, HOST_GB_PER_GPU, cures
from hpctrain.config.frozen import typed
from hpctrain.errors import ConfigError
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.slow_hosts import slow_host
from hpctrain.units import GIB

_LEAST_S = 60.0  # of allocated time; a shorter run says little about shares of time
_SMALL_MEMORY = 50.0  # percent of a GPU
_FULL_MEMORY = 95.0
_ROOM = 1.25  # what a request should have above the highest use
_HALF = 0.5
_WAITS = 0.05  # of the time, for data
_SENDS = 0.2  # of the time, for other ranks


def notes(account: RunAccount) -> list[str]:
    """Return what the user could change, each in one sentence that names the override."""
    found = [*_state(account)]
    if account.time["allocated"] >= _LEAST_S:
        found += [*_shares(account), *_hosts(account), *_devices(account), *_requests(account)]
    elif account.spans:
        found.append(
            f"the run has taken {account.time['allocated']:.0f} s: shares of less than "
            f"{_LEAST_S:.0f} s are no ground for advice"
        )
    return found


def _state(account: RunAccount) -> Iterator[str]:
    if not account.spans:
        yield "the run has not begun: there is no time to account for"
    elif account.spans[-1].runs:
        yield f"the run is in progress: this is how it stands at step {account.step:,}"
    if account.spans and not account.step:
        yield "no step was made"
    if account.unused_s >= 1:
        yield (
            f"{account.unused_s:.0f} s of allocations in which the program did not begin: "
            f"`python -m hpctrain logs {account.name}` shows what the job said"
        )


def _shares(account: RunAccount) -> Iterator[str]:
    parts = account.time
    share = {name: seconds / parts["allocated"] for name, seconds in parts.items()}
    if share["data_wait"] > _WAITS:
        yield (
            f"{_percent(share['data_wait'])} of the time the ranks waited for data: "
            f"{_cures(account, 'data')}"
        )
    slow = account.facts.record.noted("slow_rank")
    yield from (f"{text}: look at what it does there, or leave its node out" for text in slow)
    known = slow or share["slow_rank"] or slow_host(account)
    if share["communication"] > _SENDS and not known:
        yield (
            f"{_percent(share['communication'])} of the time rank 0 waited for other ranks: "
            f"{_cures(account, 'communication') or 'fewer ranks wait less'}"
        )
    saves, lost = share["checkpoint"], share["lost"]
    if saves > 0.05 and saves >= lost:
        yield (
            f"{_percent(saves)} of the time went into checkpoints: "
            f"{_saves(account, math.ceil(saves / 0.02))}"
        )
    if share["evaluation"] > 0.2:
        steps = account.value("train.eval_every")
        fewer = f"`train.eval_every={2 * int(steps)}`" if steps else "a larger `train.eval_every`"
        yield f"{_percent(share['evaluation'])} of the time went into evaluations: {fewer}"
    if share["compile"] > 0.1:
        less = "`train.compile=off` compiles nothing"
        if account.value("train.compile") == "model":
            less = f"`train.compile=blocks` compiles less, {less}"
        yield f"{_percent(share['compile'])} of the time went into torch.compile: {less}"
    if lost > 0.03 and lost > saves:
        yield (
            f"{_percent(lost)} of the time went into steps that were made again after a "
            f"restart: {_saves(account, 0.5)}"
        )
    limited = any(span.facts.reason == "SIGUSR2" for span in account.spans)
    if share["restart"] > 0.1 and limited:
        yield (
            f"{_percent(share['restart'])} of the time went into starting again: a longer "
            "`launch.time_min` starts less often"
        )


def _saves(account: RunAccount, factor: float) -> str:
    """Return the keys that say when checkpoints are written, for `factor` times the distance."""
    given = {"every_steps": account.value("checkpoint.every_steps", 200)}
    given["every_s"] = account.value("checkpoint.every_s")
    keys = {f"checkpoint.{key}": max(1, int(factor * v)) for key, v in given.items() if v}
    return ", ".join(f"`{key}={value}`" for key, value in keys.items())


def _cures(account: RunAccount, kind: str, power: int = 2) -> str:
    """Return what could be changed of this run; the keys that its file lacks have their default."""
    data = {"path": "", **account.config.get("data", {})}
    try:
        config = typed(OmegaConf.create({**account.config, "data": data}))
    except (ConfigError, AttributeError, TypeError):  # of another version
        config = typed(OmegaConf.create({"data": {"path": ""}}))
    return cures(kind, config, account.spans[-1].facts.world_size, power)


def _hosts(account: RunAccount) -> Iterator[str]:
    if (slow := slow_host(account)) is not None:
        yield (
            f"{slow.host} had the slowest rank in {_percent(slow.slowest)} of the reports: "
            f"`python -m hpctrain doctor --nodes 1 +site.sbatch.nodelist={slow.host}` looks at "
            f"it, `+site.sbatch.exclude={slow.host}` avoids it"
        )


def _devices(account: RunAccount) -> Iterator[str]:
    usage = account.usage
    if not usage.gpus:
        return
    used, memory = usage.gpu_use, usage.gpu_memory
    if memory is not None and memory < _SMALL_MEMORY:
        power = 2 ** int(math.log2(max(1.0, 0.9 * 100 / memory)))
        several = account.gpus(account.spans[-1]) > 1
        fewer = f"{'half' if memory > 25 else 'a quarter'} of the GPUs" if several else ""
        ways = [_cures(account, "room", power), fewer or "a smaller GPU is enough"]
        yield f"GPU memory {memory:.0f}% used: {'; or '.join(filter(None, ways))}"
    elif memory is not None and memory > _FULL_MEMORY:
        yield (
            f"GPU memory {memory:.0f}% used, so that a longer sample may not fit: "
            f"{_cures(account, 'memory')}"
        )
    parts = account.time
    waits = parts["data_wait"] > _WAITS * parts["allocated"]
    if used is not None and used < _HALF * 100 and not waits:  # which has its own note
        ways = [_cures(account, "room"), "fewer GPUs"]
        yield f"the GPUs were used {used:.0f}% of the time: {'; or '.join(filter(None, ways))}"
    idle = account.idle_gpu_hours
    if idle is not None and account.gpu_hours and idle > 0.2 * account.gpu_hours:
        yield (
            f"{idle:.2g} of {account.gpu_hours:.2g} GPU-hours were idle: "
            "`monitor.idle_action=stop` ends such runs"
        )
    heat = usage.of_gpus("throttled_by_heat")
    hot = sorted({node for (node, _), each in heat.items() if (each.mean() or 0) > 0.05})
    if hot:
        yield f"GPUs of {', '.join(hot)} lowered their clock because of heat: tell the operators"


def _requests(account: RunAccount) -> Iterator[str]:
    """Yield what the job asked Slurm for and did not need."""
    usage, launch = account.usage, account.value("launch", {})
    if any(span.facts.launcher != "slurm" for span in account.spans):
        return
    asked, gpus = launch.get("mem_gb"), int(launch.get("gpus_per_node") or 0)
    used = None if usage.memory_gb is None else usage.memory_gb * 1e9 / GIB
    least = max(1, HOST_GB_PER_GPU * gpus, math.ceil(_ROOM * (used or 0)))
    if asked and used is not None and used < _HALF * asked and least < asked:
        yield f"{used:.1f} GiB of {asked:g} GiB of memory used: `launch.mem_gb={least}`"
    cores, load = int(launch.get("cpus_per_task") or 1), usage.cores_use
    if load is not None and cores > 1 and load / 100 * cores < _HALF * cores:
        of_gpus = math.ceil(CORES_PER_GPU * gpus / int(launch.get("tasks_per_node") or 1))
        need = max(1, of_gpus, math.ceil(_ROOM * load / 100 * cores))
        if need < cores:
            yield f"{load:.0f}% of the cores used: `launch.cpus_per_task={need}`"
    longest = max(span.seconds for span in account.spans) / 60
    limit = int(launch.get("time_min") or 0)
    warning = int(launch.get("warn_s") or 0) // 60 + 1  # a job saves so long before its limit
    needed = max(1, math.ceil(_ROOM * longest)) + warning
    if account.state.name == "finished" and longest < _HALF * limit and needed < limit:
        yield (
            f"{longest:.0f} of {limit} minutes used: `launch.time_min={needed}` lets Slurm start "
            "the job earlier"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
