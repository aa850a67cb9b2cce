"""Which device each rank uses. There is no GPU here: what torch sees is simulated."""

import json
import re
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpctrain.base.processes import gpu_driver
from hpctrain.base.units import GIB
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.engine.distributed import devices
from hpctrain.engine.distributed.devices import Seen, agree, assign, kind
from hpctrain.engine.supervised.micro_batches import GpuMemory
from hpctrain.errors import ConfigError, DistributedError, HpctrainError, NoGpuError


def node(host: str, *gpus: Sequence[str]) -> list[Seen]:
    """Return what the ranks of a node say, each of which sees some GPUs."""
    return [Seen(host, list(seen)) for seen in gpus]


@pytest.mark.parametrize(
    ("seen", "indices"),
    [
        # All ranks see all GPUs of the node.
        (node("n1", "ab", "ab") + node("n2", "cd", "cd"), [0, 1, 0, 1]),
        (node("n1", "abcd", "abcd"), [0, 1]),
        # Each rank sees its own GPU, or its own two.
        (node("n1", "a", "b", "c"), [0, 0, 0]),
        (node("n1", "ab", "cd", "ef", "gh"), [0, 0, 0, 0]),
        # The ranks of a socket see its GPUs, as with --gpu-bind=closest.
        (node("n1", "ab", "ab", "cd", "cd"), [0, 1, 0, 1]),
        # Each rank sees its own GPU first.
        (node("n1", "ab", "ba"), [0, 0]),
        (node("n1", "", ""), [0, 0]),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(seen: list[Seen], indices: list[int]) -> None:
    assert assign(seen) == indices


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (node("n1", "a", "a"), r"ranks 0 \(n1\), 1 \(n1\) see the same 1 GPU: each rank needs one"),
        (node("n1", "ab", "ab", "ab"), "see the same 2 GPUs"),
        (node("n1", "a", "ab"), r"ranks 0 \(n1\), 1 \(n1\) would share the GPU a"),
        (node("n1", "a", "b") + node("n2", "", ""), r"no GPU on ranks 2 \(n2\), 3 \(n2\), but"),
        ([*node("n1", "a"), Seen("n2", [], "no driver")], r"^rank 1 \(n2\): no driver$"),
        (
            [Seen("n1", ["a"], mig=True), Seen("n1", ["b"], mig=True)],
            r"^ranks 0 \(n1\), 1 \(n1\): NCCL does not connect slices of GPUs \(MIG\)",
        ),
    ],
)
def test_devices_that_do_not_fit_together(seen: list[Seen], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assign(seen)


@pytest.mark.parametrize(
    ("seen", "indices"),
    [
        (node("n1", "a", "a"), [0, 0]),
        (node("n1", "ab", "ab", "ab"), [0, 1, 0]),
        (node("n1", "a", "ab"), [0, 0]),
        ([Seen("n1", ["a"], mig=True), Seen("n1", ["a"], mig=True)], [0, 0]),
        (node("n1", "", ""), [0, 0]),
    ],
)
def test_ranks_over_gloo_may_share_a_gpu(seen: list[Seen], indices: list[int]) -> None:
    assert assign(seen, share=True) == indices


def test_one_rank_may_have_a_slice_of_a_gpu() -> None:
    assert assign([Seen("n1", ["a"], mig=True)]) == [0]


def test_a_training_never_moves_to_the_cpu_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind("auto", 0, {}) == "cpu"
    assert kind("auto", 0, {"SLURM_JOB_GPUS": ""}) == "cpu"
    masked = {"CUDA_VISIBLE_DEVICES": "0,1"}
    for gpus, env, said in (
        (2, masked, r"launch\.gpus_per_node=2, but torch sees no GPU here, on .*'0,1'"),
        (0, {"SLURM_JOB_GPUS": "0,1"}, r"the job has GPUs \(SLURM_JOB_GPUS=0,1\).*'unset'"),
        (0, {"SLURM_STEP_GPUS": "3"}, r"SLURM_STEP_GPUS=3.*parallel\.device=cpu trains on the CPU"),
    ):
        with pytest.raises(ConfigError, match=said):
            kind("auto", gpus, env)
        assert kind("cpu", gpus, env) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kind("auto", 2, masked) == kind("cuda", 0, {}) == "cuda"


def start(
    seen: list[list[str] | None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    share: bool = False,
    given: int = 0,
) -> list[Any]:
    """Let ranks agree, of which each sees these GPUs; None is a rank that does not come.

    The job has so many GPUs on their node. Seeing the GPU "lost" is an error of CUDA.

    Returns:
        The device or error of each rank that comes.
    """
    mine = threading.local()
    monkeypatch.setattr(devices, "kind", lambda *_: "cuda" if mine.gpus else "cpu")
    monkeypatch.setattr(devices, "gpus_given", lambda _: given)
    monkeypatch.setattr(devices, "_TELLING_S", 0.2)

    def visible(_: str) -> list[str]:
        if "lost" in mine.gpus:
            raise RuntimeError("CUDA error: unknown error\nCUDA kernel errors might be")
        return list(mine.gpus)

    monkeypatch.setattr(devices, "visible", visible)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store = dist.HashStore()
    results: dict[int, Any] = {}

    def rank(number: int, gpus: list[str]) -> None:
        mine.gpus = gpus
        place = RankInfo("test", number, number, 0, len(seen), len(seen), 1, "", 0)
        try:
            results[number] = agree(store, place, "auto", 0, share=share)
        except HpctrainError as error:
            results[number] = error

    numbered = [(number, gpus) for number, gpus in enumerate(seen) if gpus is not None]
    if len(numbered) < len(seen):
        store.set_timeout(timedelta(seconds=0.2))
        monkeypatch.setattr(devices, "_TELLING_S", 0.0)
    threads = [threading.Thread(target=rank, args=each) for each in numbered]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number, _ in numbered]


def test_an_identity_tells_two_dies_of_amd_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: these are its properties in torch 2.8."""
    gpu = SimpleNamespace(uuid="abc", pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert devices.visible("cuda") == ["abc"]
    assert devices.visible("cpu") == []
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert devices.visible("cuda") == ["abc@0000:c1:00"]


def test_the_ranks_compare_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start([["a", "b"], ["a", "b"]], monkeypatch) == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    assert start([[], []], monkeypatch) == [torch.device("cpu")] * 2
    assert start([["a"], ["a"]], monkeypatch, share=True) == [torch.device("cuda", 0)] * 2
    for error in start([["a"], []], monkeypatch):
        assert isinstance(error, ConfigError)
        assert "torch sees no GPU on rank 1 (" in str(error)
        assert "but it does on rank 0 (" in str(error)


@pytest.mark.parametrize(
    ("seen", "given", "said", "short"),
    [
        ([["a"], ["a"]], 2, "see the same 1 GPU: each rank needs", True),
        ([["a"], ["a"]], 1, "see the same 1 GPU: each rank needs", False),
        ([["a"], []], 2, "torch sees no GPU on rank 1", True),
        ([["a", "lost"]] * 2, 2, "CUDA cannot use the GPUs here, on .*CUDA error: unknown", True),
    ],
)
def test_a_host_that_shows_fewer_gpus_than_the_job_has_is_named(
    seen: list[list[str] | None],
    given: int,
    said: str,
    short: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in start(seen, monkeypatch, given=given):
        assert isinstance(error, NoGpuError)
        assert re.search(said, str(error))
        assert list(error.hosts) == ([socket.gethostname()] if short else [])


def test_a_torch_for_cpus_on_a_host_with_gpus_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This torch may be built for GPUs, so that is planted, too."""
    monkeypatch.setattr(gpu_driver, "nvidia", lambda: "580.65.06")
    for maker in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, maker, None)
    alone = RankInfo("test", 0, 0, 0, 1, 1, 1, "", 0)
    assert agree(dist.HashStore(), alone, "cpu", 0) == torch.device("cpu")
    assert caplog.messages == [], "this was asked for"
    assert agree(dist.HashStore(), alone, "auto", 0) == torch.device("cpu")
    (said,) = caplog.messages
    assert "is built for CPUs only, but the GPUs are NVIDIA's; `make TORCH_INDEX=cu130`" in said


def test_a_rank_without_its_gpu_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("devices/1", json.dumps({"host": "n2", "gpus": [], "problem": "no driver"}))
    store.add("devices/told", 1)
    place = RankInfo("test", 0, 0, 0, 2, 2, 1, "", 0)
    with pytest.raises(ConfigError, match=r"^rank 1 \(n2\): no driver$"):
        agree(store, place, "cpu", 0)
    answer = json.loads(store.get("devices/answer"))
    assert answer["problem"] == "rank 1 (n2): no driver"


def test_ranks_that_do_not_come_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First in the log, and in the error when the time is over."""
    (error,) = start([[], None, None], monkeypatch)
    assert isinstance(error, DistributedError)
    assert str(error) == "ranks 1, 2 did not come to the start in time"
    (said,) = caplog.messages
    assert "waits for ranks 1, 2 at :0: were they started" in said


def test_a_process_keeps_to_its_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA, of which tests/gpu/test_group_gpu.py asks the real one."""
    limits: list[float] = []
    size = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: size)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, _: limits.append(part)
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: limits[-1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    devices.keep_to_share(0.25, torch.device("cuda", 0))
    assert limits == [pytest.approx(19 / 80)]  # CUDA's own memory is part of the share
    assert GpuMemory().size() == pytest.approx(19 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 80 * GIB))
    assert GpuMemory().size() == pytest.approx(7 * GIB)  # others have taken more than theirs
    with pytest.raises(ConfigError, match=r"launch.gpus_per_run=0.01: of this GPU that is 0.8 GiB"):
        devices.keep_to_share(0.01, torch.device("cuda", 0))
