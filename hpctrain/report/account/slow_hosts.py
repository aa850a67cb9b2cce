"""Which hosts of a run its other hosts have waited for, as its reports and its sensors say.

perf/slowest_rank ── rank ── the attempt's hosts ── how often each host had the slowest rank
throttled_by_heat ── the part of the samples in which a GPU of the host was too hot
"""

from collections import Counter
from dataclasses import dataclass

from hpctrain import slow
from hpctrain.rendezvous.ranks import host_of
from hpctrain.report.account.run_account import RunAccount


@dataclass(frozen=True)
class SlowHost:
    """A host of a run."""

    host: str
    # The part of the reports in which one of its ranks was the slowest, where not all are alike.
    slowest: float
    # The part of the samples in which heat lowered a GPU's clock; None if no GPU tells it.
    throttled: float | None


def slow_hosts(account: RunAccount) -> list[SlowHost]:
    """Return the hosts of a run, the slowest first; none for a single host or too few reports."""
    counts: Counter[str] = Counter()
    total = 0
    hosts: set[str] = set()
    series = account.history.series("perf/slowest_rank")
    reports = account.history.series("perf/samples_per_s").steps
    for span in account.spans:
        facts = span.facts
        if len(facts.hosts) < 2 or facts.world_size % len(facts.hosts):
            continue
        hosts |= {*facts.hosts}
        for step, rank in zip(series.steps, series.values, strict=True):
            if span.first_step < step <= span.reached and 0 <= rank < facts.world_size:
                counts[host_of(int(rank), facts.world_size, facts.hosts)] += 1
        total += sum(span.first_step < step <= span.reached for step in reports)
    total = max(total, sum(counts.values()))
    if total < slow.HOST_REPORTS or not counts:
        return []
    heat: dict[str, float] = {}
    for (host, _), sensor in account.usage.of_gpus("throttled_by_heat").items():
        heat[host] = max(heat.get(host, 0.0), sensor.mean() or 0.0)
    found = [SlowHost(host, counts[host] / total, heat.get(host)) for host in hosts]
    return sorted(found, key=lambda each: (-each.slowest, each.host))


def slow_host(account: RunAccount) -> SlowHost | None:
    """Return the host that the others wait for, if there is one."""
    hosts = slow_hosts(account)
    waits = hosts and hosts[0].slowest > max(slow.HOST_SHARE, slow.HOST_MORE / len(hosts))
    return hosts[0] if waits else None
