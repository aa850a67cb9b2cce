"""The cores of a rank: affinity, CPU quotas, hyperthreads, and what the user has said."""

import os
from pathlib import Path

import pytest
import torch

from hpctrain.base.processes.cgroup import cores
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.distributed.group import process_group, threads
from tests.steps import ALONE


def local(ranks: int, launcher: str = "submitit-local") -> RankInfo:
    return RankInfo(launcher, 0, 0, 0, ranks, ranks, 1, "localhost", 1)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 CPUs, two in each core, and a process that may use CPUs 0 to 5."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for cpu in range(8):
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}",
        )
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_cores_are_counted_once_however_many_threads_they_have(system: Path) -> None:
    assert cores(system) == 3
    assert cores(system / "none") == 6


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 3), ("250000 100000", 2), ("50000 100000", 1)]
)
@pytest.mark.parametrize("group", ["user.slice/me", "user.slice", "."])
def test_a_quota_of_any_group_above_counts(
    group: str, quota: str, expected: int, system: Path
) -> None:
    write(system / "proc/self/cgroup", "0::/user.slice/me")
    write(system / "sys/fs/cgroup" / group / "cpu.max", quota)
    assert cores(system) == expected


def test_a_quota_of_the_older_control_groups(system: Path) -> None:
    write(system / "proc/self/cgroup", "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/")
    folder = system / "sys/fs/cgroup/cpu,cpuacct"
    write(folder / "cpu.cfs_period_us", "100000")
    write(folder / "cpu.cfs_quota_us", "-1")
    assert cores(system) == 3
    write(folder / "cpu.cfs_quota_us", "200000")
    assert cores(system) == 2


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.engine.distributed.group.cores", lambda: 8)
    assert [threads(local(count), 1, {}) for count in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert threads(ALONE, 1, {}) == 8
    # A run that asks for fewer leaves the others to the runs beside it.
    assert [threads(local(2), asked, {}) for asked in (2, 4, 6)] == [2, 4, 4]
    assert threads(local(4, "slurm"), 3, {}) == 3
    for launcher in ("slurm", "torchrun", "single", "submitit-local"):
        assert threads(local(1, launcher), 1, {"OMP_NUM_THREADS": "3"}) is None


def test_a_local_run_uses_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("hpctrain.engine.distributed.group.cores", lambda: 3)
    try:
        with process_group(ALONE, ParallelConfig(device="cpu")):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
