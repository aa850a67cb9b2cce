"""Notes on a run, in the manner of jobstats: what was used badly, and the override to change."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import OmegaConf

from hpctrain.base.errors import ConfigError
from hpctrain.config.frozen import typed
from hpctrain.insight.estimates import right_size
from hpctrain.insight.estimates.advice import cures
from hpctrain.insight.report.account.run_account import RunAccount

_LEAST_S = 60.0  # of allocated time; a shorter run says little about shares of time


@dataclass
class _Seen:
    """The figures of a run by which it is judged; shares are those of the allocated time."""

    account: RunAccount
    share: dict[str, float]

    def percent(self, part: str) -> str:
        return f"{100 * self.share[part]:.0f}% of the time"

    def cures(self, kind: str, otherwise: str = "", power: int = 2) -> str:
        """Return what could be changed; the keys that the run's file lacks have their default."""
        data = {"path": "", **self.account.config.get("data", {})}
        try:
            config = typed(OmegaConf.create({**self.account.config, "data": data}))
        except (ConfigError, AttributeError, TypeError):  # of another version
            config = typed(OmegaConf.create({"data": {"path": ""}}))
        found = cures(kind, config, self.account.spans[-1].facts.world_size, power)
        return "; or ".join(filter(None, (found, otherwise)))

    def times(self, factor: float, **keys: int | None) -> str:
        """Return keys (with their defaults, `__` for a dot) at so many times their values."""
        named = {key.replace("__", "."): default for key, default in keys.items()}
        found = {key: self.account.value(key, default) for key, default in named.items()}
        return ", ".join(f"`{k}={max(1, int(factor * v))}`" for k, v in found.items() if v)

    def saves(self, factor: float) -> str:
        return self.times(factor, checkpoint__every_steps=200, checkpoint__every_s=None)

    def of_time(self) -> Iterator[str]:
        """Yield what took too much of the time."""
        share, slow = self.share, self.account.facts.record.noted("slow_rank")
        if share["data_wait"] > 0.05:
            yield f"{self.percent('data_wait')} the ranks waited for data: {self.cures('data')}"
        if slow:
            yield (
                f"{'; '.join(slow)}: look at what it does there, or leave its node out "
                "(`+site.sbatch.exclude=NODE`)"
            )
        if 0.05 < share["checkpoint"] >= share["lost"]:
            rarer = math.ceil(share["checkpoint"] / 0.02)
            yield f"{self.percent('checkpoint')} went into checkpoints: {self.saves(rarer)}"
        elif share["lost"] > max(0.03, share["checkpoint"]):
            again = "went into steps that were made again after a restart"
            yield f"{self.percent('lost')} {again}: {self.saves(0.5)}"
        if share["evaluation"] > 0.2:
            fewer = self.times(2, train__eval_every=None) or "fewer of them"
            yield f"{self.percent('evaluation')} went into evaluations: {fewer}"

    def of_gpus(self) -> Iterator[str]:
        """Yield what of the GPUs was not used, as far as sensors tell it."""
        account, usage = self.account, self.account.usage
        memory = _known(usage.peak("memory_usage_percentage"))
        if memory < 50:
            several = account.gpus(account.spans[-1]) > 1
            fewer = f"{'half' if memory > 25 else 'a quarter'} of the GPUs" if several else ""
            power = 2 ** int(math.log2(max(1.0, 90 / max(memory, 1e-9))))
            cure = self.cures("room", fewer or "a smaller GPU is enough", power)
            yield f"GPU memory {memory:.0f}% used: {cure}"
        use = _known(usage.mean("utilization_percentage"))
        if use < 50 and self.share["data_wait"] <= 0.05:
            cure = self.cures("room", "fewer GPUs")
            yield f"the GPUs were used {use:.0f}% of the time: {cure}"
        hours, idle = account.gpu_hours, _known(usage.idle_gpu_hours())
        if hours and idle > 0.2 * hours:
            yield (
                f"{idle:.2g} of {hours:.2g} GPU-hours were idle: `monitor.idle_action=stop` ends "
                "such runs"
            )


def notes(account: RunAccount) -> list[str]:
    """Return what the user could change, each in one sentence that names the override."""
    time = account.time
    if not account.spans:
        return ["the run has not begun: there is no time to account for"]
    found = []
    if account.spans[-1].runs:
        found.append(f"the run is in progress: this is how it stands at step {account.step:,}")
    if not account.step:
        found.append("no step was made")
    if account.unused_s >= 1:
        found.append(
            f"{account.unused_s:.0f} s of allocations in which the program did not begin: "
            f"`python -m hpctrain logs {account.name}` shows what the job said"
        )
    if time["allocated"] < _LEAST_S:
        return [
            *found,
            f"the run has taken {time['allocated']:.0f} s: shares of less than {_LEAST_S:.0f} s "
            "are no ground for advice",
        ]
    seen = _Seen(account, {name: seconds / time["allocated"] for name, seconds in time.items()})
    said, unused = _requests(account)
    return [*(*found, *said, *seen.of_time(), *seen.of_gpus()), *filter(None, ["; ".join(unused)])]


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _requests(account: RunAccount) -> tuple[list[str], list[str]]:
    """Return what the site says of the job, and what it asked Slurm for and did not need."""
    launch = account.value("launch", {})
    longest = max(span.seconds for span in account.spans) / 60
    minutes = longest if account.state.name == "finished" else None
    if any(span.facts.launcher != "slurm" for span in account.spans):
        return [], []
    return right_size.of_job(account.usage, launch, account.value("site.rules"), minutes)
