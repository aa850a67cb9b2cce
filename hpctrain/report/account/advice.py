"""Notes on a run, in the manner of jobstats: what was used badly, and the override to change."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.slow_hosts import slow_hosts

_LEAST_S = 60.0  # of allocated time; a shorter run says little about shares of time
_SMALL_MEMORY = 50.0  # percent of a GPU
_FULL_MEMORY = 95.0
_ROOM = 1.25  # what a request should have above the highest use
_HALF = 0.5


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
    if share["data_wait"] > 0.05:
        threads = int(account.value("data.threads", 1) or 1)
        yield (
            f"{_percent(share['data_wait'])} of the time the ranks waited for data: "
            f"`data.threads={2 * threads}`, or `data.stage=node` if the file system is slow"
        )
    slow = account.facts.record.noted("slow_rank")
    yield from (f"{text}: look at what it does there, or leave its node out" for text in slow)
    if share["communication"] > 0.2 and not slow and not share["slow_rank"]:
        yield (
            f"{_percent(share['communication'])} of the time rank 0 waited for other ranks: a "
            "larger `train.global_batch_size`, fewer `launch.nodes`, or `train.accumulate`"
        )
    if share["checkpoint"] > 0.05:
        every = int(account.value("checkpoint.every_steps", 200) or 200)
        times = math.ceil(share["checkpoint"] / 0.02)
        yield (
            f"{_percent(share['checkpoint'])} of the time went into checkpoints: "
            f"`checkpoint.every_steps={every * times}`"
        )
    if share["evaluation"] > 0.2:
        every, seconds = account.value("train.eval_every"), account.value("train.eval_every_s")
        fewer = f"`train.eval_every={2 * int(every)}`" if every else "a larger `train.eval_every`"
        fewer = f"`train.eval_every_s={2 * float(seconds):g}`" if seconds and not every else fewer
        yield f"{_percent(share['evaluation'])} of the time went into evaluations: {fewer}"
    if share["compile"] > 0.1:
        yield (
            f"{_percent(share['compile'])} of the time went into torch.compile: "
            "`train.compile=blocks` compiles less, `train.compile=off` nothing"
        )
    if share["lost"] > 0.03:
        every = int(account.value("checkpoint.every_steps", 200) or 200)
        yield (
            f"{_percent(share['lost'])} of the time went into steps that were made again after a "
            f"restart: `checkpoint.every_steps={max(1, every // 2)}`"
        )
    if share["restart"] > 0.1 and account.spans[-1].facts.launcher == "slurm":
        yield (
            f"{_percent(share['restart'])} of the time went into starting again: a longer "
            "`launch.time_min` starts less often"
        )


def _hosts(account: RunAccount) -> Iterator[str]:
    hosts = slow_hosts(account)
    if hosts and hosts[0].slowest > max(_HALF, _ROOM / len(hosts)):
        host = hosts[0].host
        yield (
            f"{host} had the slowest rank in {_percent(hosts[0].slowest)} of the reports: "
            f"`python -m hpctrain doctor --nodes 1 +site.sbatch.nodelist={host}` looks at it, "
            f"`site.sbatch.exclude={host}` avoids it"
        )


def _devices(account: RunAccount) -> Iterator[str]:
    usage = account.usage
    if not usage.gpus:
        return
    used = usage.mean(usage.of_gpus("utilization_percentage").values())
    memory = usage.peak(usage.of_gpus("memory_usage_percentage").values())
    if memory is not None and memory < _SMALL_MEMORY:
        yield f"GPU memory {memory:.0f}% used: {_larger(account, memory)}"
    elif memory is not None and memory > _FULL_MEMORY:
        yield (
            f"GPU memory {memory:.0f}% used: a longer sample may not fit; "
            "`train.micro_batch_size=auto` finds the size that does"
        )
    if used is not None and used < _HALF * 100:
        yield (
            f"the GPUs were used {used:.0f}% of the time: a larger micro-batch "
            "(`train.micro_batch_size=auto`), or fewer GPUs"
        )
    idle = usage.idle_gpu_hours(float(account.value("monitor.idle_percent", 5.0)))
    if idle is not None and account.gpu_hours and idle > 0.2 * account.gpu_hours:
        yield (
            f"{idle:.2g} of {account.gpu_hours:.2g} GPU-hours were idle: "
            "`monitor.idle_action=stop` ends such runs"
        )
    heat = usage.of_gpus("throttled_by_heat")
    hot = sorted({node for (node, _), each in heat.items() if (each.mean() or 0) > 0.05})
    if hot:
        yield f"GPUs of {', '.join(hot)} lowered their clock because of heat: tell the operators"


def _larger(account: RunAccount, memory: float) -> str:
    """Return the override of a larger micro-batch, and what else would use the memory."""
    size = account.value("train.micro_batch_size")
    ranks = account.spans[-1].facts.world_size
    batch = int(account.value("train.global_batch_size", 0) or 0)
    pieces = int(account.value("train.accumulate", 1) or 1)
    now = int(size) if str(size).isdecimal() else batch // max(1, ranks * pieces)
    power = 2 ** int(math.log2(max(1.0, 0.9 * 100 / memory)))
    most = batch // ranks if batch else now * power
    fits = min(now * power, most)
    gpus = account.gpus(account.spans[-1])
    fewer = f"{_fraction(memory)} of the GPUs" if gpus > 1 else "a smaller GPU"
    if fits > now:
        return f"`train.micro_batch_size={fits}`, or {fewer}"
    return f"a larger `train.global_batch_size`, or {fewer}"


def _fraction(memory: float) -> str:
    return "half" if memory > 25 else "a quarter"


def _requests(account: RunAccount) -> Iterator[str]:
    """Yield what the job asked Slurm for and did not need."""
    usage, launch = account.usage, account.value("launch", {})
    if any(span.facts.launcher != "slurm" for span in account.spans):
        return
    asked, peak = launch.get("mem_gb"), usage.of_nodes("system_memory_usage_megabytes")
    used = usage.peak(peak.values())
    if asked and used is not None and used / 1000 < _HALF * asked:
        yield (
            f"{used / 1000:.1f} GB of {asked:g} GB of memory used: "
            f"`launch.mem_gb={max(1, math.ceil(_ROOM * used / 1000))}`"
        )
    cores, busy = (
        int(launch.get("cpus_per_task") or 1),
        usage.of_nodes("cpu_utilization_percentage"),
    )
    load = usage.mean(busy.values())
    if load is not None and cores > 1 and load / 100 * cores < _HALF * cores:
        need = max(1, math.ceil(_ROOM * load / 100 * cores))
        if need < cores:
            yield f"{load:.0f}% of the cores used: `launch.cpus_per_task={need}`"
    longest = max(span.seconds for span in account.spans) / 60
    limit = int(launch.get("time_min") or 0)
    if account.state.name == "finished" and limit and longest < _HALF * limit:
        yield (
            f"{longest:.0f} of {limit} minutes used: `launch.time_min="
            f"{max(1, math.ceil(_ROOM * longest))}` lets Slurm start the job earlier"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
