"""The account of one run: all that `report` says about it, as numbers.

run.json ── attempts ─┐
journal ── where time went, metrics ─┼── RunAccount ── JSON, terminal, page
monitor/ ── energy, use ─────────────┤
sacct ── queue, allocations ─────────┘
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.names.metric_names import main_metric
from hpctrain.base.units import GIB
from hpctrain.commands.facts import Facts, gather
from hpctrain.commands.state import UNDER_WAY, State, best, state_of
from hpctrain.config.frozen import values_of
from hpctrain.insight.estimates import hardware
from hpctrain.insight.estimates.usage import Usage
from hpctrain.insight.report.account.history import History
from hpctrain.insight.report.account.time_parts import (
    PARTS,
    USEFUL,
    Allocation,
    Span,
    allocate,
    allocations,
    divide,
    spans,
)
from hpctrain.runs.sweep_overrides import distinguishing


@dataclass
class RunAccount:
    """What is known about a run."""

    facts: Facts  # directory and place in the queue
    state: State
    config: dict[str, Any]  # frozen, as plain values
    history: History
    usage: Usage  # the samples of the sensors
    spans: list[Span]  # the attempts, with the parts of their time
    queue_s: float | None  # None if unknown
    unused_s: float  # of allocations in which no attempt has begun
    now: float  # of all this, in seconds since the epoch
    left_out: list[str] = field(default_factory=list)  # what is not said, and why
    # What distinguishes it from the others of its report or sweep, by key.
    swept: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.facts.name

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the config by its dotted name."""
        node: Any = self.config
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    @property
    def time(self) -> dict[str, float]:
        """Seconds of the allocations: `allocated`, and its parts, which add up to it."""
        parts = {name: sum(span.parts[name] for span in self.spans) for name in PARTS}
        parts["idle"] += self.unused_s
        return {"allocated": sum(parts.values()), **parts}

    @property
    def goodput(self) -> float | None:
        """The part of the allocated time in which steps were made that count; None if unknown."""
        parts = self.time
        if not parts["allocated"] or any(not span.records for span in self.spans):
            return None
        return sum(parts[name] for name in USEFUL) / parts["allocated"]

    def gpus(self, span: Span) -> int:
        """Return the GPUs that an attempt had: those that its launch asked for, or has seen."""
        nodes = span.facts.nodes
        asked = int(self.value("launch.gpus_per_node", 0) or 0)
        if asked and span.facts.launcher == "slurm":
            return asked * nodes
        if not self.usage.gpus:
            return 0
        return min(len(self.usage.gpus), span.facts.world_size)

    @property
    def gpu_hours(self) -> float:
        """The allocated hours, times GPUs or the share of one; 0 without GPUs."""
        seconds = sum(self.gpus(span) * span.seconds for span in self.spans)
        seconds += self.unused_s * self.gpus(self.spans[-1]) if self.spans else 0.0
        return seconds / 3600 * float(self.value("launch.gpus_per_run") or 1.0)

    @property
    def core_hours(self) -> float:
        """The allocated hours, times the cores that the launch asked for."""
        cores = int(self.value("launch.cpus_per_task", 1) or 1)
        ranks = ((span.facts.world_size, span.seconds) for span in self.spans)
        return sum(count * cores * seconds for count, seconds in ranks) / 3600

    @property
    def hardware(self) -> hardware.Hardware | None:
        """The hardware that the config names, or that the GPUs of the run are; None if unknown."""
        if section := self.config.get("hardware"):
            try:
                return hardware.of_section(section)
            except ConfigError:
                return None
        titles = {title for title in self.usage.gpus.values() if title}
        return hardware.of_device(next(iter(titles))) if len(titles) == 1 else None

    @property
    def cost(self) -> tuple[float, str] | None:
        """The amount and the currency of the GPU-hours; None without a price or without GPUs."""
        price = self.hardware.price_per_hour if self.hardware else None
        if price is None or not self.gpu_hours:
            return None
        return price.amount * self.gpu_hours, price.currency

    @property
    def step(self) -> int:
        """The last step that counts."""
        if not self.spans:
            return 0
        reached = self.facts.record.reached
        return self.spans[-1].reached if reached is None else reached

    @property
    def metric(self) -> str:
        """The main metric: the one of the config if the run has it, or another evaluation's."""
        wanted, result = str(self.config.get("metric") or "val/accuracy"), self.facts.record.result
        if wanted in (result or {}):
            return wanted
        return main_metric(wanted, {*self.history.metrics, *(result or {})}) or wanted

    def has_result(self, metric: str) -> bool:
        """Return whether the run has finished with a finite value of a metric."""
        return self.state.name == "finished" and math.isfinite(self.final(metric))

    def final(self, metric: str) -> float:
        """Return the last value of a metric; NaN if the run has none."""
        result = self.facts.record.result or {}
        value = result[metric] if metric in result else self.history.series(metric).last()
        return math.nan if value is None else float(value)

    def hosts(self, span: Span) -> list[str]:
        """Return the hosts of an attempt; of torchrun's, those on which a monitor has run."""
        measured = sorted(self.usage.nodes) if span.facts.nodes > 1 else []
        return [*span.facts.hosts] or measured or [span.facts.host or "unknown"]

    @property
    def best(self) -> dict[str, Any] | None:
        """Metric, value and step of the best value, as `status` has it."""
        found, metric = best(self.facts), self.facts.progress.metric
        return {"metric": metric, "value": found[0], "step": found[1]} if found else None

    @property
    def gpu_memory_gib(self) -> float | None:
        """The most memory of a GPU that tensors have needed, in GiB; None if it is not known."""
        most = max(self.history.series("perf/memory_peak_gib").finite(), default=0.0)
        return most or self.usage.peak("memory_usage_megabytes", GIB / 1e6)


def read(paths: Sequence[Path], now: float | None = None) -> list[RunAccount]:
    """Read the accounts of runs. `squeue` and `sacct` are called once for all of them."""
    now = time.time() if now is None else now
    gathered = gather(paths)
    jobs = {job for facts in gathered for job in facts.jobs}
    booked = allocations(jobs) if jobs else {}
    accounts = [_account(facts, booked, now) for facts in gathered]
    _distinguish(accounts)
    return accounts


def _distinguish(accounts: Sequence[RunAccount]) -> None:
    """Note at each run what distinguishes it: as its sweep has it, or what its config has alone."""
    records = [account.facts.record for account in accounts]
    for account, record in zip(accounts, records, strict=True):
        account.swept = dict(text.partition("=")[::2] for text in record.swept)
    sweeps = {(record.sweep or {}).get("uid") for record in records}
    if len(accounts) > 1 and not (len(sweeps) == 1 and all(each.swept for each in accounts)):
        told = [record.overrides or record.swept for record in records]
        given = [(account.config, texts) for account, texts in zip(accounts, told, strict=True)]
        for account, values in zip(accounts, distinguishing(given), strict=True):
            account.swept = values


def _account(facts: Facts, booked: dict[str, list[Allocation]] | None, now: float) -> RunAccount:
    state, history, usage = state_of(facts, now), History.read(facts.path), Usage.read(facts.path)
    running = state.name in UNDER_WAY
    heard = [*usage.times(), *filter(None, [facts.progress.time])]
    found = spans(facts.record.attempts, history, heard, running=running, now=now)
    if found and found[-1].begin <= facts.progress.time:  # it is written more often than reports
        found[-1].reached = max(found[-1].reached, facts.progress.step or 0)
    divide(found, history)
    jobs = dict.fromkeys(facts.jobs)
    own = {job: booked[job] for job in jobs if booked and job in booked}
    if facts.record.by_worker:  # its job has trained other trials before, between, and after
        own = {}
    unused = allocate(found, own, now, shared=facts.record.shares_job)
    queue, why = _queue(facts, own, found, now)
    config, damage = dict[str, Any](), list[str]()
    try:
        config = values_of(facts.path / "config.yaml", facts.record)
    except ConfigError as error:
        damage = [str(error)]
    account = RunAccount(*(facts, state, config, history, usage, found, queue, unused, now))
    account.left_out += [*damage, *_left_out(account, why)]
    return account


def _queue(
    facts: Facts, own: dict[str, list[Allocation]], found: list[Span], now: float
) -> tuple[float | None, str]:
    """Return the seconds in the queue, and why they are not known."""
    if own:
        waits = [(each.start or now) - each.submitted for some in own.values() for each in some]
        return sum(max(0.0, wait) for wait in waits), ""
    if not facts.jobs:
        return 0.0, ""
    submitted = facts.record.submitted
    after = [span.begin for span in found if submitted and span.begin >= submitted]
    if after and len(found) == len(after) == 1:
        return after[0] - submitted, ""
    return None, "queue time: there is no accounting database (sacct) that knows the jobs"


def _left_out(account: RunAccount, why_no_queue: str) -> list[str]:
    """Return what the account cannot say, each with its reason."""
    found = [why_no_queue] if why_no_queue else []
    without = [str(span.number) for span in account.spans if not span.records]
    if without:
        found.append(
            f"time of attempt {', '.join(without)} by part, and goodput: the journal has no record "
            "of it (tracking.enabled=false, an attempt that ended early, or an older version)"
        )
    if account.history.damaged:
        found.append(f"{account.history.damaged} damaged places in the journal")
    if account.gpu_hours and account.cost is None:
        found.append(
            "cost: the hardware is not known, or has no price; trainings with hardware=NAME "
            "hardware.price.own='1.20 EUR' have yours"
        )
    return found
