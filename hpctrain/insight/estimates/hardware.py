"""What a GPU can do, and what it costs: one file of `conf/hardware` for each kind of machine.

    conf/hardware/h100_sxm.yaml ──┐
    a user's --config-dir         ├── Hardware ── plan, MFU, cost, doctor, report
    torch.cuda.get_device_name() ─┘

A figure that a file leaves out is None: what would need it is left out, too, and never guessed.
This module does not import torch, so that a login node can use it.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base import gone
from hpctrain.base.errors import ConfigError
from hpctrain.base.files import yaml_file
from hpctrain.base.units import GIB

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_PRICES = ("own", "on_demand", "spot")  # the first that a file gives is the one that counts

_TOLERANCE = 0.1  # drivers and reserved memory change what a device reports
_LINK = {"kind": None, "gb_per_s": 1e9, "latency_us": 1e-6}
# The keys of a file: a number, with its unit in bytes, seconds and watts, other keys, or any value.
_KEYS: dict[str, Any] = {
    **dict.fromkeys(("name", "title", "devices")),
    "memory_gib": float(GIB),
    "memory_gb_per_s": 1e9,
    **dict.fromkeys(("gpus_per_node", "power_w"), 1.0),
    **dict.fromkeys(("matmul_efficiency", "attention_efficiency"), 1.0),
    "peak_tflops": dict.fromkeys((*DTYPES, "fp64"), 1e12),
    **dict.fromkeys(("host", "inside", "between"), _LINK),
    "price": dict.fromkeys((*_PRICES, "date")),
}
_TEXTS = {
    **dict.fromkeys(("name", "title", "price.date"), "str"),
    **dict.fromkeys(("host.kind", "inside.kind", "between.kind"), "str"),
    "devices": "list[str]",
}


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of a node, or the nodes."""

    kind: str = ""  # such as `NVLink 4`
    bandwidth: float | None = None  # bytes/s that one GPU can send, while it receives as many
    latency_s: float | None = None  # of the smallest message


@dataclass(frozen=True)
class Price:
    """What one GPU costs."""

    amount: float  # of one GPU for one hour
    currency: str  # such as USD
    kind: str  # `own`, `on_demand` or `spot`
    date: str = ""  # when it was valid

    def __str__(self) -> str:
        when = f" ({self.date})" if self.date else ""
        return f"{self.amount:g} {self.currency} {self.kind.replace('_', ' ')}{when}"


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU in its usual node. Every figure may be None, which means unknown."""

    name: str  # of the file, as in `hardware=h100_sxm`
    title: str  # for a reader
    memory_bytes: int | None  # that torch sees: `total_memory`
    peak_flops: Mapping[str, float]  # dense, per second, by the names of `precision.compute`
    memory_bandwidth: float | None  # bytes/s
    gpus_per_node: int | None  # of a usual node
    inside: Link  # between the GPUs of a node
    between: Link  # between nodes, per GPU
    power_w: float | None  # the limit of a GPU
    prices: Mapping[str, Price]  # by kind
    devices: tuple[str, ...] = ()  # exact, as torch and the driver report them
    matmul_efficiency: float | None = None  # the part of the peak that the largest products reach
    attention_efficiency: float | None = None  # the part that the flash kernel reaches
    host: Link = Link()  # between a GPU and its node, such as PCIe

    @property
    def price_per_hour(self) -> Price | None:
        """The price that counts: a user's own, or else on demand, or else spot."""
        return next((self.prices[kind] for kind in _PRICES if kind in self.prices), None)

    @property
    def spot(self) -> Price | None:
        """The price of capacity that may be taken away; None beside a user's own price."""
        return None if "own" in self.prices else self.prices.get("spot")

    def peak(self, compute: str) -> float | None:
        """Return the dense peak in FLOP/s of a format, or None if it is unknown."""
        return self.peak_flops.get(compute)

    def lacks(self, compute: str) -> Iterator[str]:
        """Yield a warning if the file has no peak for a number format, though it has others."""
        if self.peak_flops and compute not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            yield (
                f"precision.compute={compute}: hardware={self.name} has no peak for it "
                f"({self.title}: {known}), so step time, MFU and cost are unknown"
            )

    @property
    def missing(self) -> list[str]:
        """The figures that the file leaves out; what follows from them is unknown."""
        inside = 0.0 if self.gpus_per_node == 1 else self.inside.bandwidth  # one GPU needs none
        figures = {
            "memory_gib": self.memory_bytes,
            "peak_tflops": self.peak_flops or None,
            "memory_gb_per_s": self.memory_bandwidth,
            "gpus_per_node": self.gpus_per_node,
            "inside.gb_per_s": inside,
            "between.gb_per_s": self.between.bandwidth,
            "power_w": self.power_w,
            "price": self.prices or None,
        }
        return [name for name, value in figures.items() if value is None]


def known(folders: Iterable[Path | str] = ()) -> list[str]:
    """Return the names of all hardware files, in alphabetical order."""
    return sorted({path.stem for path in _files(folders)})


def load(name: str, folders: Iterable[Path | str] = ()) -> Hardware:
    """Read the file of a machine; a ConfigError if there is no such file, or it is wrong."""
    folders = list(folders)
    path = next((path for path in _files(folders) if path.stem == name), None)
    if path is None:
        raise ConfigError(
            f"hardware={name}: known are {', '.join(known(folders))}. For another machine write "
            "hardware/NAME.yaml in the manner of conf/hardware/h100_sxm.yaml, into conf or a "
            "folder that --config-dir names"
        )
    section = yaml_file.read(path, _TEXTS)
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: it has no keys; conf/hardware/h100_sxm.yaml is an example")
    return of_section({"name": name, **section}, str(path))


def of_section(section: Mapping[str, Any], where: str = "hardware") -> Hardware:
    """Return the hardware of the section `hardware` of a config; a ConfigError names a bad key."""
    found = _checked(where, section, _KEYS)
    for key in ("matmul_efficiency", "attention_efficiency"):
        if (part := found[key]) is not None and part > 1:
            raise ConfigError(f"{where}.{key}={part:g}: it is a part of the peak, at most 1")
    memory, gpus = found["memory_gib"], found["gpus_per_node"]
    if gpus is not None and gpus != int(gpus):
        raise ConfigError(f"{where}.gpus_per_node={gpus:g}: it must be a whole number")
    links: dict[str, Any] = {
        name: Link(str(found[name]["kind"] or ""), *[found[name][key] for key in [*_LINK][1:]])
        for name in ("host", "inside", "between")
    }
    date = str(found["price"].pop("date") or "")
    return Hardware(
        name=str(found["name"] or "hardware"),
        title=str(found["title"] or found["name"] or "hardware"),
        memory_bytes=None if memory is None else int(memory),
        peak_flops={key: peak for key, peak in found["peak_tflops"].items() if peak is not None},
        memory_bandwidth=found["memory_gb_per_s"],
        gpus_per_node=None if gpus is None else int(gpus),
        prices={
            kind: _price(f"{where}.price.{kind}", kind, value, date)
            for kind, value in found["price"].items()
            if value is not None
        },
        devices=tuple(map(str, found["devices"] or ())),
        **{key: found[key] for key in ("matmul_efficiency", "attention_efficiency")},
        power_w=found["power_w"],
        **links,
    )


def of_device(device_title: str, memory_bytes: int | None = None) -> Hardware | None:
    """Return the hardware of a device; None if no file has exactly this name and memory."""
    for hardware in map(load, known()):
        if device_title in hardware.devices and _as_large(hardware.memory_bytes, memory_bytes):
            return hardware
    return None


def peak_of(
    section: Mapping[str, Any], compute: str, device: str, memory_bytes: int | None
) -> float | None:
    """Return the peak in FLOP/s of a device, by its exact name; of a CPU ("") only a given one."""
    # The section may also be of a machine that is only planned with.
    found = of_section(section) if section else None
    if device and (found is None or device not in found.devices):
        found = of_device(device, memory_bytes)
    elif not device and found is not None and not found.name.startswith("cpu"):
        return None
    return None if found is None else found.peak(compute)


def _as_large(stated: int | None, reported: int | None) -> bool:
    if stated is None or reported is None:
        return True
    return abs(reported - stated) <= _TOLERANCE * stated


def _files(folders: Iterable[Path | str]) -> list[Path]:
    places = [*(Path(folder) / "hardware" for folder in folders), yaml_file.conf_dir() / "hardware"]
    return [path for place in places for path in sorted(place.glob("*.yaml"))]


def _price(where: str, kind: str, value: Any, date: str) -> Price:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Z]{3})\s*", str(value))
    amount = float(found[1]) if found and found[1].count(".") <= 1 and found[1] != "." else None
    if not found or amount is None:
        raise ConfigError(
            f"{where}={value}: a price is an amount and its currency, for one GPU and hour, such "
            "as 2.50 USD or 2.50 EUR"
        )
    return Price(amount, found[2], kind, date)


def _checked(where: str, node: Any, keys: Any) -> Any:
    """Return the value of a key in bytes, seconds and watts; all `keys` of one that has some."""
    if isinstance(keys, dict):
        node = {} if node is None else node
        if not isinstance(node, Mapping):
            raise ConfigError(f"{where}={node}: it must be {{{': ..., '.join(keys)}: ...}}")
        for key in node:
            if key not in keys:
                left = gone.sentence(f"hardware.{key}")
                if left and node[key] is None:  # in a run of before
                    continue
                unknown = f"{where}.{key} is unknown: allowed are {', '.join(keys)}"
                raise ConfigError(left or unknown)
        return {key: _checked(f"{where}.{key}", node.get(key), keys[key]) for key in keys}
    if keys is None or node is None:
        return node
    try:
        number = math.nan if isinstance(node, bool) else float(node)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{where}={node}: it must be a number greater than 0, or null (unknown)")
    return number * keys
