"""Tests of the job's control group, with the files that Slurm and the kernel write."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.insight.monitor.cgroup import JobCgroup


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def job(tmp_path: Path, membership: str, files: dict[str, str]) -> JobCgroup:
    pid = os.getpid()
    proc = tree(tmp_path / "proc", {f"{pid}/cgroup": membership})
    return JobCgroup(pid, tree(tmp_path / "sys", files), proc)


def test_version_2(tmp_path: Path) -> None:
    at = "system.slice/slurmstepd.scope/job_12"
    found = job(
        tmp_path,
        f"0::/{at}/step_0/user/task_3\n",
        {
            f"{at}/cpu.stat": "usage_usec 2500000\nuser_usec 2\n",
            f"{at}/cpu.max": "max 100000\n",
            f"{at}/cpuset.cpus.effective": "0-3,8\n",
            f"{at}/memory.current": "3000000\n",
            f"{at}/memory.stat": "anon 5\ninactive_file 1000000\n",
            f"{at}/memory.max": "8000000\n",
            f"{at}/step_0/user/task_3/memory.current": "7\n",
        },
    )
    assert found.found
    assert found.use() == (2.5, 5.0, 2_000_000, 8_000_000)


def test_version_1_and_a_quota(tmp_path: Path) -> None:
    at = "slurm/uid_0/job_12"
    found = job(
        tmp_path,
        f"4:memory:/{at}/step_0/task_0\n3:cpuset:/{at}/step_0\n2:cpu,cpuacct:/{at}/step_0\n0::/\n",
        {
            f"cpuacct/{at}/cpuacct.usage": "1500000000\n",
            f"cpuset/{at}/cpuset.cpus": "0,1\n",
            f"memory/{at}/memory.usage_in_bytes": "900\n",
            f"memory/{at}/memory.stat": "total_inactive_file 100\n",
            f"memory/{at}/memory.limit_in_bytes": "9223372036854771712\n",  # none
            "memory/slurm/memory.limit_in_bytes": "4000\n",
            f"cpuacct/{at}/cpu.cfs_quota_us": "150000\n",
            f"cpuacct/{at}/cpu.cfs_period_us": "100000\n",
        },
    )
    assert found.use() == (1.5, 1.5, 800, 4_000)


def test_a_job_of_a_similar_name_is_not_taken(tmp_path: Path) -> None:
    assert not job(tmp_path, "0::/user.slice/job_x/session\n", {"job_x/cpu.stat": ""}).found


@pytest.mark.skipif(JobCgroup(os.getpid()).found, reason="these tests run inside of a job")
def test_without_a_group_the_processes_are_added_up() -> None:
    before = JobCgroup(os.getpid()).use()
    code = "x = bytearray(80_000_000)\nend = __import__('time').process_time() + 0.3\n"
    code += "while __import__('time').process_time() < end: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        now = JobCgroup(os.getpid()).use()
        child.communicate(b"\n")
    time.sleep(0)
    assert now.memory is not None
    assert before.memory is not None
    assert now.memory > before.memory + 70_000_000
    assert now.cpu_s is not None
    assert before.cpu_s is not None
    assert now.cpu_s > before.cpu_s + 0.25
