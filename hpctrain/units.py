"""Units of memory, in bytes, and bytes for a reader."""

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
