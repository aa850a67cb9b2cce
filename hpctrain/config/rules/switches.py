"""Keys that do nothing by themselves: those of a section whose first key, its switch, is off.

A frozen config is not asked: a run of an older version goes on as it began.
"""

from collections.abc import Iterable, Iterator

from hpctrain.config.schema import Config, all_keys

# Without it, the whole model is trained in place of adapters.
NEEDED = ("train.lora.match",)
# These may be switched off for one run of a config that has them, so the rest is only warned of.
USUAL = (
    *("data.windows.field", "data.images.field", "data.buckets.field"),
    *("train.early_stopping.metric", "train.compression.kind", "train.local_sgd.every"),
)


def idle(config: Config, switches: Iterable[str]) -> Iterator[str]:
    """Yield the keys that are given, but do nothing because the switch of their section is off."""
    known = {key.name: key for key in all_keys()}
    for name in switches:
        switch, section = known[name], f"{name.rpartition('.')[0]}."
        if switch.value(config) != switch.default:
            continue
        for key in (key for key in known.values() if key.name.startswith(section)):
            if (value := key.value(config)) != key.default:
                yield (
                    f"{key.name}={value} needs {name}: without it, this key does nothing; give "
                    f"{name}, or leave this key at {key.default}"
                )
