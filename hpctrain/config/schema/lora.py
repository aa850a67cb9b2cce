"""The keys of `train.lora`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key


def _check_patterns(patterns: Any) -> str:
    texts = patterns if isinstance(patterns, list) else [patterns]
    fits = patterns is None or (texts and all(isinstance(text, str) and text for text in texts))
    return "" if fits else "it must be a pattern, a list of patterns, or null"


@dataclass
class LoRAConfig:
    """Only small matrices beside chosen linear layers are trained (LoRA, Hu et al. 2021).

    The weights of the model are those of checkpoint.init_from, which are not changed or saved.
    """

    match: Any = key(
        None,
        "Linear layers whose names fit one of these patterns get an adapter: one pattern, or a "
        "list. A * stands for any text. Null trains the model itself.",
        check=_check_patterns,
    )
    rank: int = key(8, "Adapters have this rank.", at_least=1)
    alpha: float = key(16.0, "What an adapter adds is multiplied by alpha / rank.", above=0)
    dropout: float = key(
        0.0,
        "In training, inputs of adapters are zeroed with this probability.",
        at_least=0,
        below=1,
    )
    also: list[str] = key(
        [],
        "Parameters whose names fit one of these patterns are trained and saved as well, such as "
        "those of a new head.",
    )
    quantize: str | None = key(
        None,
        "nf4: the frozen weights of the matched layers are held in 4 bits (QLoRA), by "
        "bitsandbytes. For one process and DDP. Null holds them as they are.",
        choices=(None, "nf4"),
    )

    @property
    def patterns(self) -> list[str]:
        """The patterns of `match`; none without LoRA."""
        return [self.match] if isinstance(self.match, str) else list(self.match or [])
