"""Tests of what the kernel tells of InfiniBand, with its files written by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.doctor.checks import infiniband
from hpctrain.doctor.finding import worst


def port(folder: Path, adapter: str, state: str = "4: ACTIVE", **counters: int) -> Path:
    place = folder / adapter / "ports" / "1"
    (place / "counters").mkdir(parents=True, exist_ok=True)
    (place / "state").write_text(f"{state}\n")
    (place / "rate").write_text("400 Gb/sec (4X NDR)\n")
    for name, value in counters.items():
        (place / "counters" / name).write_text(f"{value}\n")
    return place


def test_infiniband(tmp_path: Path) -> None:
    (absent,) = infiniband.checked(tmp_path / "no")
    assert (absent.verdict, infiniband.rates(tmp_path / "no")) == ("unknown", "none")
    for adapter in ("mlx5_0", "mlx5_1"):
        port(tmp_path, adapter, symbol_error=7, link_downed=2)
    (found,) = infiniband.checked(tmp_path)
    assert (found.verdict, found.found) == ("pass", "active: 2 x 400 Gb/sec (4X NDR)")
    before = infiniband.errors(tmp_path)
    assert worst(infiniband.risen(before, before)) == "pass"
    port(tmp_path, "mlx5_1", symbol_error=19)
    (found,) = infiniband.risen(before, infiniband.errors(tmp_path))
    assert (found.verdict, found.found) == ("warn", "mlx5_1/1: symbol_error +12")
    port(tmp_path, "mlx5_1", state="1: DOWN")
    (found,) = infiniband.checked(tmp_path)
    assert "1 of 2 ports are active; not mlx5_1/1 (1: DOWN)" in found.found
    (found,) = infiniband.risen(before, infiniband.errors(tmp_path))
    assert "no longer active: mlx5_1/1" in found.found


def test_the_library_of_infiniband(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for it counts the devices that have a provider."""
    counts = iter((0, 2))

    def list_devices(count: Any) -> int:
        count._obj.value = next(counts)
        return 0

    verbs = SimpleNamespace(ibv_get_device_list=list_devices)
    monkeypatch.setattr(infiniband.ctypes, "CDLL", lambda name: verbs)
    found = infiniband.library()
    assert (found.verdict, "NCCL falls back to TCP" in found.found) == ("warn", True)
    assert infiniband.library().verdict == "pass"
    monkeypatch.undo()
    monkeypatch.setattr(infiniband, "_LIBRARY", "libnone.so.1")  # it is not installed
    assert "libnone.so.1" in infiniband.library().found


def test_whether_nccl_would_use_the_adapters(tmp_path: Path) -> None:
    assert not infiniband.is_used(tmp_path, {})
    port(tmp_path, "mlx5_0", state="1: DOWN")
    assert not infiniband.is_used(tmp_path, {})
    port(tmp_path, "mlx5_0")
    assert infiniband.is_used(tmp_path, {"NCCL_IB_DISABLE": "0"})
    for variable, value in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket"), ("NCCL_NET", "OFI")):
        assert not infiniband.is_used(tmp_path, {variable: value})


def test_counters_that_the_kernel_does_not_show_are_said(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    found = {one.check: one.verdict for one in infiniband.checked(tmp_path)}
    assert found == {"InfiniBand": "pass", "InfiniBand errors": "unknown"}
    assert [*infiniband.risen(infiniband.errors(tmp_path), {})] == []
