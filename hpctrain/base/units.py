"""Units of memory, in bytes; bytes and durations for a reader."""

MIB = 2**20
GIB = 2**30
# Of an element, by number format; what fp8 does not compute stays in bf16.
ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


def readable(nbytes: float) -> str:
    """Return bytes in the unit in which the number has at most four digits."""
    return next(
        f"{nbytes / 1024**power:,.1f} {'KMGTP'[power - 1]}iB"
        for power in (2, 3, 4, 5)
        if nbytes < 1000 * 1024**power or power == 5
    )


def duration(seconds: float) -> str:
    """Return a rounded duration: `0.25 s`, `45 s`, `12 min`, `3 h 20 min` or `2 d 4 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
