"""The clocks of hosts against each other and against a file server."""

from statistics import median

from hpctrain.doctor.finding import Finding, judged

_WARN_S = 2.0


def skew(check: str, seconds: float) -> Finding:
    """Judge the difference of two clocks in seconds."""
    found = f"{round(seconds, 1) + 0.0:+.1f} s"
    return judged(
        check,
        abs(seconds) < _WARN_S,
        found,
        f"within {_WARN_S:g} s",
        "Ask the administrators to let the clock be set by NTP (`chronyc tracking`): times of "
        "files and logs cannot be compared.",
    )


def compared(times: dict[str, float]) -> dict[str, Finding]:
    """Judge the clock of each host, in seconds since 1970 at one moment, against the median."""
    middle = median(times.values())
    return {host: skew("clock", seconds - middle) for host, seconds in times.items()}
