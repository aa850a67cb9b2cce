"""Which split a sample goes to: by a hash of its key, so that it stays when data is added."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import xxhash

from hpctrain.data.index import check_name
from hpctrain.errors import ConfigError, DataError


@dataclass(frozen=True)
class Split:
    """Names with fractions that add up to 1."""

    fractions: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "train=0.9,val=0.1".

        Raises:
            ConfigError: It is not like that, or the fractions do not add up to 1.
        """
        fractions: dict[str, float] = {}
        for part in text.split(","):
            name, _, fraction = part.strip().partition("=")
            try:
                check_name(name, "split")
                value = float(fraction)
            except (DataError, ValueError):
                raise ConfigError(f"--split {text!r}: {part!r} is not NAME=FRACTION") from None
            if name in fractions or not 0 < value <= 1:
                raise ConfigError(
                    f"--split {text!r}: {part!r}: each name once, with a fraction above 0, up to 1"
                )
            fractions[name] = value
        if abs(sum(fractions.values()) - 1) > 1e-6:
            raise ConfigError(
                f"--split {text!r}: the fractions add up to {sum(fractions.values()):g}, not 1"
            )
        return cls(fractions)

    def of(self, key: bytes) -> str:
        """The split of the sample with this key."""
        place = xxhash.xxh3_64_intdigest(key) / 2**64
        for name, end in zip(self.fractions, accumulate(self.fractions.values()), strict=True):
            if place < end:
                return name
        return name  # rounding: the fractions add up to a little less than 1
