"""The result of one check, of several together, and the hosts that new jobs avoid after them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.files import yaml_file
from hpctrain.cluster.slurm import excluded_hosts

Result = Literal["pass", "unknown", "warn", "fail"]
_TEXTS: dict[str, list[str]] = yaml_file.read(Path(__file__).with_name("texts.yaml"))
_ORDER: tuple[Result, ...] = ("pass", "unknown", "warn", "fail")
# The beginnings of checks that are not about the host.
_NOT_OF_HOST = ("communication", "port of rank 0", "output_dir", "data.path", "interface ")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str  # such as "file locks of output_dir"
    # "fail": a training would fail or give wrong numbers. "warn": it would be slow, or may fail
    # later. "unknown": this could not be looked at.
    result: Result
    found: str
    expected: str = ""  # "" where `found` says it all
    cure: str = ""  # one sentence; "" after "pass"


def good(check: str, found: str) -> Finding:
    """Return the finding of a check that has passed."""
    return Finding(check, "pass", found)


def unknown(check: str, why: str, cure: str = "") -> Finding:
    """Return the finding of something that could not be looked at, with the reason."""
    return Finding(check, "unknown", why, cure=cure)


def bad(kind: str, result: Result, found: str, check: str = "", **names: object) -> Finding:
    """Return the finding of a check that has not passed.

    texts.yaml has what is expected of its kind and what to do, with words for the `names`.
    """
    expected, cure = (text.format_map(names) for text in _TEXTS[kind])
    return Finding(check or kind, result, found, expected, cure)


def judged(
    kind: str, well: bool, found: str, otherwise: Result = "warn", check: str = "", **names: object
) -> Finding:
    """Return the finding of a check that has passed if it is `well`; see `bad`."""
    return good(check or kind, found) if well else bad(kind, otherwise, found, check, **names)


def bounded(
    kind: str,
    value: float,
    shown: str,
    bounds: tuple[float, float],
    check: str = "",
    **names: object,
) -> Finding:
    """Return the finding of a number that should not be too small; see `bad`.

    It fails below the first bound, and warns below the second. `shown` is the number with its unit.
    """
    fails, warns = bounds
    otherwise: Result = "fail" if value < fails else "warn"
    return judged(kind, value >= max(fails, warns), shown, otherwise, check, **names)


def worst(findings: Iterable[Finding]) -> Result:
    """Return the result of all findings together; what is unknown does not count."""
    found = {each.result for each in findings} - {"unknown"}
    return max(found, key=_ORDER.index, default="pass")


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
