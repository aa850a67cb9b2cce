"""The statistics of a field in a split, and their parts as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.shards.field import Field


@dataclass(frozen=True)
class Summary:
    """The statistics of a field in a split.

    Attributes:
        split: The split's name.
        count: The number of samples in the split.
        name: The field's name.
        field: The field's schema.
        mean: The mean of the finite values; None where there are none, as for the next three.
        std: The population standard deviation of the finite values.
        min: The smallest finite value.
        max: The largest finite value.
        nonfinite: The number of values that are not finite.
        nan: The number of values that are NaN.
        classes: How often each value occurs, for a field of whole numbers with few values.
        lengths: The mean, std, min, max and total of the lengths of a variable-length field.
    """

    split: str
    count: int
    name: str
    field: Field
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    nonfinite: int = 0
    nan: int = 0
    classes: Mapping[int, int] | None = None
    lengths: Mapping[str, float | None] | None = None


def class_name(value: int, names: Sequence[str]) -> str:
    """Return the name of a class, or "" where it has none."""
    return names[value] if 0 <= value < len(names) else ""


def not_finite(summary: Summary) -> str:
    """Return `12 NaN, 3 infinite`, "0", or "-" if there are no statistics."""
    if summary.mean is None and summary.min is None and not summary.nonfinite:
        return "-"  # no statistics
    if not summary.nonfinite:
        return "0"
    counts = {"NaN": summary.nan, "infinite": summary.nonfinite - summary.nan}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
