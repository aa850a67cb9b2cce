"""What is remembered of each host: one line of JSON for each check, and whether jobs avoid it.

OUTPUT_DIR/doctor/history.jsonl
{"time": 1767225600.0, "host": "node1", "by": "doctor", "verdict": "warn", "findings": [...],
 "figures": {...}}

Findings that have passed are left out.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from hpctrain.disk import LARGEST_JSON, open_below
from hpctrain.doctor.finding import Finding, Verdict, worst
from hpctrain.errors import DamageError, StorageError
from hpctrain.record import Finite, Record, Time, decode, read_bytes
from hpctrain.run_record import Host
from hpctrain.slurm import excluded_hosts
from hpctrain.slurm.excluded_hosts import folder_of

_NAME, _PARTS = "history.jsonl", 2
# The beginnings of checks that are not about the host.
_NOT_OF_HOST = ("communication", "port of rank 0", "output_dir", "data.path", "interface ")


class Entry(Record, frozen=True, kw_only=True):
    """The result of one check of a host."""

    time: Time
    host: Host
    by: str = ""  # "doctor", or the name of a run
    verdict: Verdict
    findings: tuple[Finding, ...] = ()  # those that have not passed
    figures: dict[str, Finite] = msgspec.field(default_factory=dict)  # of the host, by name


def add(
    output_dir: str,
    by: str,
    places: Mapping[str, Sequence[Finding]],
    figures: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Append the result of a check, by host. Several jobs may do so at once.

    `by` is "doctor", or the name of a run. A file that cannot be written is a StorageError.
    """
    folder = folder_of(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        Entry(
            time=time.time(),
            host=host,
            by=by,
            verdict=worst(findings),
            findings=tuple(one for one in findings if one.verdict in ("warn", "fail")),
            figures=dict((figures or {}).get(host, {})),
        )
        for host, findings in places.items()
    ]
    # One write into a file that is open for appending is not mixed with that of another process.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    try:
        with open(open_below(folder / _NAME, flags, _PARTS), "ab", buffering=0) as file:
            file.write(msgspec.json.Encoder().encode_lines(entries))
    except OSError as error:
        raise StorageError(f"{folder / _NAME}: {error.strerror}") from error


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
        host: [one for one in findings if one.verdict == "fail"]
        for host, findings in places.items()
    }
    often = Counter(check for found in failures.values() for check in {one.check for one in found})
    found: dict[str, Finding] = {}
    for host, each in failures.items():
        for one in each:
            shared = len(places) > 1 and often[one.check] == len(places)
            if not shared and not one.check.startswith(_NOT_OF_HOST):
                found.setdefault(host, one)
    return found


def read(output_dir: str) -> list[Entry]:
    """Return all entries, the oldest first; a line that is damaged is left out."""
    path = folder_of(output_dir) / _NAME
    try:
        lines = read_bytes(path, _PARTS, LARGEST_JSON)[0].splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for line in lines:
        with suppress(DamageError):
            entries.append(decode(Entry, line, path))
    return entries
