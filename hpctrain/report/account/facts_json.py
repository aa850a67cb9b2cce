"""The account of a run as JSON: what `report --json` prints, one object for each run."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from hpctrain.report.account.advice import notes
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.slow_hosts import slow_hosts
from hpctrain.report.account.standing import verdict, why


def as_json(account: RunAccount) -> dict[str, Any]:
    """Return the account for `print_json`; None where a figure is not known.

    Seconds are those of the allocations, and the parts of `time` add up to `allocated`.
    """
    cost, best = account.cost, account.best
    return {
        "run": account.name,
        "path": str(account.facts.path),
        "state": account.state.name,
        "reason": account.state.reason,
        "verdict": verdict(account),
        "as_of": account.now,
        "in_progress": bool(account.spans and account.spans[-1].runs),
        "swept": account.swept,
        "step": account.step,
        "samples": account.samples,
        "time": {name: round(seconds, 3) for name, seconds in account.time.items()},
        "attempts": [
            {
                "attempt": span.number,
                "begin": span.begin,
                "seconds": round(span.seconds, 3),
                "first_step": span.first_step,
                "reached": span.reached,
                "state": span.state,
                "why": why(span),
                "hosts": account.hosts(span),
                "world_size": span.facts.world_size,
                "job_id": span.facts.job_id,
                "time": {name: round(value, 3) for name, value in span.parts.items()},
            }
            for span in account.spans
        ],
        "queue_s": account.queue_s,
        "goodput": account.goodput,
        "gpu_hours": account.gpu_hours,
        "idle_gpu_hours": account.idle_gpu_hours,
        "core_hours": account.core_hours,
        "kwh": account.kwh,
        "cost": None if cost is None else cost[0],
        "currency": None if cost is None else cost[1],
        "per": account.per,
        "gpu_memory_gib": account.gpu_memory_gib,
        "gpu_utilization_percent": account.usage.gpu_use,
        "memory_gb": account.usage.memory_gb,
        "slow_hosts": [asdict(each) for each in slow_hosts(account)],
        "best": best if best is None or math.isfinite(best["value"]) else None,
        "metrics": {name: each.last() for name, each in sorted(account.history.metrics.items())},
        "profile": account.profile,
        "notes": notes(account),
        "left_out": account.left_out,
    }
