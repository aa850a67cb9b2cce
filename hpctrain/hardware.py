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

from hpctrain import yaml_file
from hpctrain.errors import ConfigError
from hpctrain.units import GIB

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_PRICES = ("own", "on_demand", "spot")  # the first that a file gives is the one that counts

_TOLERANCE = 0.1  # drivers and reserved memory change what a device reports
_KEYS = (
    *("name", "title", "devices", "memory_gib", "peak_tflops", "memory_gb_per_s", "gpus_per_node"),
    *("host", "inside", "between", "power_w", "price", "matmul_efficiency", "attention_efficiency"),
    *("storage_mb_per_s", "node_power_w"),
)
# The keys that are one number, each with its unit in bytes, seconds and watts.
_FIGURES = {
    "memory_gib": GIB,
    "memory_gb_per_s": 1e9,
    "storage_mb_per_s": 1e6,
    **dict.fromkeys(("gpus_per_node", "power_w", "node_power_w"), 1),
    **dict.fromkeys(("matmul_efficiency", "attention_efficiency"), 1),
}
_TEXTS = {
    **dict.fromkeys(("name", "title", "price.date"), "str"),
    **dict.fromkeys(("host.kind", "inside.kind", "between.kind"), "str"),
    "devices": "list[str]",
}
_LINK_KEYS = ("kind", "gb_per_s", "latency_us")
_PRICE_KEYS = (*_PRICES, "date")


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
    storage_rate: float | None = None  # bytes/s that a node reads from the storage of the data
    node_power_w: float | None = None  # beside its GPUs (TDP); energy counts it, too
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
    def missing(self) -> dict[str, str]:
        """The figures that the file leaves out, with what cannot be said without them."""
        inside = 0.0 if self.gpus_per_node == 1 else self.inside.bandwidth  # one GPU needs none
        parts = {
            "memory_gib": (self.memory_bytes, "whether a layout fits"),
            "peak_tflops": (self.peak_flops or None, "step time, MFU and all that follows"),
            "memory_gb_per_s": (self.memory_bandwidth, "the time of work bound by memory"),
            "gpus_per_node": (self.gpus_per_node, "which ranks share a node"),
            "inside.gb_per_s": (inside, "communication inside a node"),
            "between.gb_per_s": (self.between.bandwidth, "communication between nodes"),
            "power_w": (self.power_w, "energy"),
            "price": (self.prices or None, "cost"),
        }
        return {name: lost for name, (value, lost) in parts.items() if value is None}


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
    _check_keys(where, section, _KEYS)
    peaks = _mapping(f"{where}.peak_tflops", section.get("peak_tflops"), (*DTYPES, "fp64"))
    figures = {key: _number(f"{where}.{key}", section.get(key), _FIGURES[key]) for key in _FIGURES}
    for key, part in figures.items():
        if key.endswith("_efficiency") and part is not None and part > 1:
            raise ConfigError(f"{where}.{key}={part:g}: it is a part of the peak, at most 1")
    memory, gpus = figures["memory_gib"], figures["gpus_per_node"]
    if gpus is not None and gpus != int(gpus):
        raise ConfigError(f"{where}.gpus_per_node={gpus:g}: it must be a whole number")
    prices = _mapping(f"{where}.price", section.get("price"), _PRICE_KEYS)
    date = str(prices.pop("date", None) or "")
    return Hardware(
        name=str(section.get("name") or "hardware"),
        title=str(section.get("title") or section.get("name") or "hardware"),
        memory_bytes=None if memory is None else int(memory),
        peak_flops={
            dtype: peak
            for dtype, value in peaks.items()
            if (peak := _number(f"{where}.peak_tflops.{dtype}", value, 1e12)) is not None
        },
        memory_bandwidth=figures["memory_gb_per_s"],
        gpus_per_node=None if gpus is None else int(gpus),
        host=_link(f"{where}.host", section.get("host")),
        inside=_link(f"{where}.inside", section.get("inside")),
        between=_link(f"{where}.between", section.get("between")),
        power_w=figures["power_w"],
        prices={
            kind: _price(f"{where}.price.{kind}", kind, value, date)
            for kind, value in prices.items()
            if value is not None
        },
        devices=tuple(str(device) for device in section.get("devices") or ()),
        matmul_efficiency=figures["matmul_efficiency"],
        attention_efficiency=figures["attention_efficiency"],
        storage_rate=figures["storage_mb_per_s"],
        node_power_w=figures["node_power_w"],
    )


def of_device(
    device_title: str, memory_bytes: int | None = None, folders: Iterable[Path | str] = ()
) -> Hardware | None:
    """Return the hardware of a device; None if no file has exactly this name and memory."""
    folders = list(folders)
    for name in known(folders):
        hardware = load(name, folders)
        if device_title in hardware.devices and _as_large(hardware.memory_bytes, memory_bytes):
            return hardware
    return None


def _as_large(stated: int | None, reported: int | None) -> bool:
    if stated is None or reported is None:
        return True
    return abs(reported - stated) <= _TOLERANCE * stated


def _files(folders: Iterable[Path | str]) -> list[Path]:
    places = [*(Path(folder) / "hardware" for folder in folders), yaml_file.conf_dir() / "hardware"]
    return [path for place in places for path in sorted(place.glob("*.yaml"))]


def _link(where: str, node: Any) -> Link:
    link = _mapping(where, node, _LINK_KEYS)
    return Link(
        str(link.get("kind") or ""),
        _number(f"{where}.gb_per_s", link.get("gb_per_s"), 1e9),
        _number(f"{where}.latency_us", link.get("latency_us"), 1e-6),
    )


def _price(where: str, kind: str, value: Any, date: str) -> Price:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Z]{3})\s*", str(value))
    amount = float(found[1]) if found and found[1].count(".") <= 1 and found[1] != "." else None
    if not found or amount is None:
        raise ConfigError(
            f"{where}={value}: a price is an amount and its currency, for one GPU and hour, such "
            "as 2.50 USD or 2.50 EUR"
        )
    return Price(amount, found[2], kind, date)


def _check_keys(where: str, section: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in section:
        if key not in allowed:
            raise ConfigError(f"{where}.{key} is unknown: allowed are {', '.join(allowed)}")


def _mapping(where: str, node: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    if node is None:
        return {}
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where}={node}: it must be {{{': ..., '.join(allowed)}: ...}}")
    _check_keys(where, node, allowed)
    return dict(node)


def _number(where: str, value: Any, unit: float = 1) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{where}={value}: it must be a number greater than 0, or null (unknown)")
    return number * unit
