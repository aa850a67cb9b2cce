"""Tests of the figures of GPUs: conf/hardware and a user's own files."""

import re
import runpy
from itertools import permutations
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.insight.estimates.hardware import (
    DTYPES,
    Hardware,
    Link,
    Price,
    known,
    load,
    of_device,
    of_section,
)
from tests.conftest import ROOT

UNKNOWN = {"h100_64": ("memory_gb_per_s",)}
NO_TF32 = dict.fromkeys(("mi250x", "mi355x"), ("tf32",))


@pytest.mark.parametrize("name", known())
def test_a_file_is_complete_and_plausible(name: str) -> None:
    hardware = load(name)
    assert hardware.name == name
    if name == "cpu":  # its figures are left open, and it says what that costs
        assert set(hardware.missing) >= {"memory_gib", "peak_tflops", "power_w", "price"}
        return
    assert set(hardware.missing) <= {"price", *UNKNOWN.get(name, ())}
    assert set(hardware.peak_flops) >= set(DTYPES) - {"fp8", *NO_TF32.get(name, ())}
    assert hardware.devices
    for device in hardware.devices:  # no other file claims it
        found = of_device(device, hardware.memory_bytes)
        assert found is not None
        assert found.name == name
    peaks = [hardware.peak_flops[dtype] for dtype in DTYPES if dtype in hardware.peak_flops]
    assert peaks == sorted(peaks)
    if hardware.gpus_per_node != 1:
        assert (hardware.inside.bandwidth or 0) > (hardware.between.bandwidth or 0)
    assert (hardware.host.bandwidth or 0) >= 31.5e9


def test_no_gpu_costs_more_than_one_that_is_better_in_all_figures() -> None:
    """On demand, of one vendor: an A100 of 40 GB does not cost more than one of 80 GB."""

    def figures(one: Hardware) -> tuple[float, ...]:
        found = one.memory_bytes, one.peak("bf16"), one.memory_bandwidth, one.inside.bandwidth
        return tuple(each or 0.0 for each in found)

    all_kinds = [one for name in known() if (one := load(name)).title.startswith("NVIDIA")]
    priced = {one.name: one for one in all_kinds if "on_demand" in one.prices}
    ordered = {
        (one.name, better.name)
        for one, better in permutations(priced.values(), 2)
        if all(a <= b for a, b in zip(figures(one), figures(better), strict=True))
    }
    assert {("a100_40", "a100_80"), ("h100_pcie", "h100_sxm")} <= ordered
    for one, better in ordered:
        amounts = [priced[name].prices["on_demand"].amount for name in (one, better)]
        assert amounts == sorted(amounts), (one, better)


@pytest.mark.parametrize("name", sorted(set(known()) - {"cpu"}))
def test_figures_agree_with_each_other(name: str) -> None:
    """Dense tensor units: 16 bits make half of 8 bits, and tf32 half of 16 bits, in all GPUs here.

    A figure with sparsity, or of another GPU, breaks that. torch sees a bit less memory than the
    title says, whose GB are GiB: ECC of GDDR6 takes a sixteenth, and the driver a little.
    """
    hardware = load(name)
    half = hardware.peak_flops["bf16"]
    assert half == hardware.peak_flops["fp16"]
    for dtype, factor in (("fp8", 2), ("tf32", 0.5)):
        if (peak := hardware.peak(dtype)) is not None:
            assert peak == pytest.approx(factor * half, rel=0.02), dtype
    label = re.search(r"(\d+) GB", hardware.title)
    assert label is not None
    part = (hardware.memory_bytes or 0) / (int(label[1]) * 2**30)
    assert (0.92 if name == "l40s" else 0.975) < part <= 1


def test_the_page_has_every_file() -> None:
    assert "<!-- generated: hardware -->" in (ROOT / "docs/plan.md").read_text()
    rows = "\n".join(runpy.run_path(str(ROOT / "docs/generate.py"))["kinds"]())
    assert re.findall(r"^\| `(\w+)` \|", rows, re.M) == [name for name in known() if name != "cpu"]
    assert "| `h100_sxm` | NVIDIA H100 SXM 80 GB | 79.2 | 989 |" in rows


def test_a_number_format_that_the_gpu_does_not_have() -> None:
    (text,) = load("a100_80").lacks("fp8")
    assert text == (
        "precision.compute=fp8: hardware=a100_80 has no peak for it (NVIDIA A100 SXM 80 GB: fp32, "
        "tf32, bf16, fp16), so step time, MFU and cost are unknown"
    )
    assert [*load("mi250x").lacks("tf32")]  # null in the file
    assert not [*load("a100_80").lacks("bf16"), *load("cpu").lacks("fp8")]  # cpu gives no peaks


def test_units() -> None:
    hardware = load("h100_sxm")
    assert hardware.peak("bf16") == 989.4e12
    assert hardware.memory_bandwidth == 3.35e12
    assert hardware.inside.bandwidth == 450e9
    assert hardware.inside == Link("NVLink 4", 450e9, pytest.approx(4e-6))
    assert isinstance(hardware, Hardware)
    assert hardware.peak("int4") is None


def test_the_own_price_counts_first() -> None:
    section = {"price": {"on_demand": "3 USD", "own": "1.25EUR", "date": "2026-01"}}
    price = of_section(section).price_per_hour
    assert price == Price(1.25, "EUR", "own", "2026-01")


@pytest.mark.parametrize(
    ("title", "memory", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 85_017_493_504, "h100_sxm"),
        ("NVIDIA A100-SXM4-40GB", 42_298_834_944, "a100_40"),
        ("NVIDIA GeForce RTX 4090", None, "rtx_4090"),
        ("NVIDIA GH200 120GB", 97_871 * 2**20, "gh200"),  # of nvidia-smi
        ("NVIDIA H100", 65_247 * 2**20, "h100_64"),
        ("NVIDIA H100 80GB HBM3", 96 * 2**30, None),  # another H100 under the same name
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("Tesla T4", None, None),
    ],
)
def test_a_device_is_known_by_its_exact_name(
    title: str, memory: int | None, name: str | None
) -> None:
    found = of_device(title, memory)
    assert (found and found.name) == name


def test_a_users_file_is_found_first(tmp_path: Path) -> None:
    folder = tmp_path / "hardware"
    folder.mkdir()
    (folder / "mine.yaml").write_text("devices: [Mine 1]\nmemory_gib: 10\n")
    (folder / "cpu.yaml").write_text("memory_gib: 4\n")
    assert load("mine", [tmp_path]).memory_bytes == 10 * 2**30
    assert load("cpu", [tmp_path]).memory_bytes == 4 * 2**30
    assert "mine" in known([tmp_path])
    assert "peak_tflops" in load("mine", [tmp_path]).missing
    assert of_section({"storage_mb_per_s": None}).missing  # as runs of before have it


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"memory": 80}, "hardware.memory is unknown: allowed are name, title"),
        ({"storage_mb_per_s": 5}, "hardware.storage_mb_per_s has left hpctrain: `bench"),
        ({"memory_gib": "much"}, "hardware.memory_gib=much: it must be a number"),
        ({"peak_tflops": {"int4": 1}}, "hardware.peak_tflops.int4 is unknown"),
        ({"peak_tflops": 3}, "hardware.peak_tflops=3: it must be {fp32"),
        ({"price": {"own": 3}}, "hardware.price.own=3: a price is an amount and its currency"),
        ({"gpus_per_node": 2.5}, "hardware.gpus_per_node=2.5: it must be a whole number"),
        ({"inside": {"gb_per_s": -1}}, "hardware.inside.gb_per_s=-1: it must be a number"),
    ],
)
def test_what_is_wrong_in_a_file(section: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_section(section)
    assert text in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"hardware=v100: known are a100_40.*hardware/NAME\.yaml"):
        load("v100")
