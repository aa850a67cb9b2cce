"""The allocations of jobs, as Slurm's accounting has them: queue time, start, end, nodes and GPUs.

A job that was requeued has one allocation for each time that it ran (`sacct --duplicates`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.cluster.slurm.queue import ask, rows, since_epoch

_FIELDS = ("JobID", "Submit", "Start", "End", "State", "NNodes", "AllocTRES")
_AT_ONCE = 500  # job ids of one call of sacct


@dataclass(frozen=True)
class Allocation:
    """One time that a job ran or waited."""

    submitted: float  # or requeued, in seconds since the epoch
    start: float | None  # None while it waits, or if it never started
    end: float | None  # None while it has its nodes
    state: str  # Slurm's
    nodes: int
    gpus: int = 0  # of all nodes; 0 where the site does not count them (AccountingStorageTRES)


def allocations(job_ids: Iterable[str]) -> dict[str, list[Allocation]] | None:
    """Return the allocations of jobs by job id, in the order of their submission.

    They are None without an accounting database. With no job, nothing is called.
    """
    ids = sorted(set(job_ids))
    found: dict[str, list[Allocation]] = defaultdict(list)
    for begin in range(0, len(ids), _AT_ONCE):
        some = ",".join(ids[begin : begin + _AT_ONCE])
        answer = ask(
            *("sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"),
            *(f"--jobs={some}", f"--format={','.join(_FIELDS)}"),
            quiet=True,
        )
        if answer is None:
            return None
        fields = (r"\d\S*", *[r"[^|]*"] * 4, r"\d+", r"[^|]*")
        for job, submitted, start, end, state, nodes, resources in rows(answer, fields):
            if (since := since_epoch(submitted)) is not None:
                gpus = re.search(r"\bgres/gpu=(\d+)", resources)
                times = since, since_epoch(start), since_epoch(end)
                one = Allocation(*times, state, int(nodes), int(gpus[1]) if gpus else 0)
                found[job].append(one)
    return {job: sorted({*each}, key=lambda one: one.submitted) for job, each in found.items()}
