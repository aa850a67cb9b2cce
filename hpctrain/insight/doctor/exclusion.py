"""Which nodes new jobs avoid after a check: those that have failed by their own fault."""

from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.cluster.slurm import excluded_hosts
from hpctrain.insight.doctor.finding import Finding, worst

# The beginnings of checks that are not about the host.
_NOT_OF_HOST = ("communication", "port of rank 0", "output_dir", "data.path", "interface ")


def exclude(output_dir: str, places: Mapping[str, Sequence[Finding]]) -> dict[str, Finding]:
    """Exclude the hosts that have failed from new jobs, and end that of those that have not.

    It returns the hosts that are excluded now because of these findings.
    """
    failed = at_fault(places)
    reasons = {host: f"{one.check}: {one.found}" for host, one in failed.items()}
    passed = [host for host, findings in places.items() if worst(findings) != "fail"]
    excluded_hosts.change(output_dir, reasons, passed)
    return failed


def at_fault(places: Mapping[str, Sequence[Finding]]) -> dict[str, Finding]:
    """Return the hosts that have failed by their own fault, each with its first failure.

    That all hosts share one, such as a full file system, or that the ranks cannot meet, is no fault
    of a single host.
    """
    failures = {
        host: [one for one in findings if one.result == "fail"] for host, findings in places.items()
    }
    often = Counter(check for found in failures.values() for check in {one.check for one in found})
    found: dict[str, Finding] = {}
    for host, each in failures.items():
        for one in each:
            shared = len(places) > 1 and often[one.check] == len(places)
            if not shared and not one.check.startswith(_NOT_OF_HOST):
                found.setdefault(host, one)
    return found
