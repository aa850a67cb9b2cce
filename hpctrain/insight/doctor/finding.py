"""The result of one check, and of several together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Result = Literal["pass", "unknown", "warn", "fail"]
_ORDER: tuple[Result, ...] = ("pass", "unknown", "warn", "fail")


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


def judged(
    check: str,
    well: bool,
    found: str,
    expected: str,
    cure: str,
    otherwise: Result = "warn",
) -> Finding:
    """Return the finding of a check that has passed if it is `well`."""
    return good(check, found) if well else Finding(check, otherwise, found, expected, cure)


def bounded(
    check: str,
    value: float,
    shown: str,
    *,
    fail_below: float | None = None,
    warn_below: float | None = None,
    expected: str,
    cure: str,
) -> Finding:
    """Return the finding of a number that should not be too small.

    It fails below one bound, and warns below another; None is no bound. `shown` is the number with
    its unit, and `cure` what to do if it is too small.
    """
    if fail_below is not None and value < fail_below:
        return Finding(check, "fail", shown, expected, cure)
    if warn_below is not None and value < warn_below:
        return Finding(check, "warn", shown, expected, cure)
    return good(check, shown)


def worst(findings: Iterable[Finding]) -> Result:
    """Return the result of all findings together; what is unknown does not count."""
    found = {each.result for each in findings} - {"unknown"}
    return max(found, key=_ORDER.index, default="pass")
