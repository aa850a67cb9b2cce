"""Tests of what the kernel and DCGM tell of a node, with their files and answers written by hand.

There is neither InfiniBand nor DCGM here.
"""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.doctor.checks import dcgm, infiniband, kernel_log
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


def test_the_log_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = tmp_path / "kmsg", 100_000.0  # the test machine may have started a minute ago
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now)
    assert kernel_log.checked(tmp_path / "no").verdict == "unknown"
    begin = int(1e6 * (now - 7200))
    log.write_text(
        f"6,1,{begin},-;eth0: link up\n"
        f"4,2,{begin},-;NVRM: Xid (PCI:0000:17:00): 31, pid=7, a program's own error\n"
    )
    assert kernel_log.checked(log).verdict == "pass"
    with log.open("a") as file:
        file.write(f"4,3,{begin},-;NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus.\n")
    found = kernel_log.checked(log)
    assert found.verdict == "warn"
    assert "Xid 79 of GPU 0000:17:00 (fallen off the bus), 2.0 hours ago" in found.found

    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr("os.open", refused)
    found = kernel_log.checked()
    assert (found.verdict, "only root" in found.found) == ("unknown", True)


def test_dcgm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of DCGM 3 and 4, which nest their results differently."""
    program = tmp_path / "dcgmi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def answered(text: str, code: int = 0) -> tuple[str, str]:
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        program.chmod(0o755)
        found = dcgm.checked(run=True)
        return found.verdict, found.found

    old = {"name": "Row remap", "results": [{"gpu_ids": "2", "status": "FAIL", "warnings": "bad"}]}
    answer = json.dumps({"DCGM GPU Diagnostic": {"test_categories": [{"tests": [old]}]}})
    assert answered(f"note\n{answer}", 226) == ("warn", "Row remap: GPU 2 bad")
    new = {
        "name": "software",
        "results": [{"entity_group": "GPU", "entity_id": n, "status": "Pass"} for n in (0, 1)],
        "test_summary": {"status": "Pass"},
    }
    answer = json.dumps({"DCGM Diagnostic": {"test_categories": [{"tests": [new]}]}})
    assert answered(answer) == ("pass", "2 results passed")
    assert answered("Error: unable to establish a connection", 1)[0] == "unknown"
    assert dcgm.checked(run=False).verdict == "unknown"
    monkeypatch.setenv("PATH", "")
    assert "no dcgmi" in dcgm.checked(run=True).found
