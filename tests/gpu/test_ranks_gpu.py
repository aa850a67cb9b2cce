"""What several GPU ranks do when one of them fails or hangs, and how they find their GPUs."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hpctrain.cluster.ranks import flight_recorder
from hpctrain.errors import DataError
from tests.gpu.device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]
ALL_REDUCE = "dist.all_reduce(value); torch.cuda.synchronize()"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# As a rank of `hpctrain run`: cli.main calls this in the place of a command.
RANK = """
import os, sys, time
from pathlib import Path
from hpctrain import cli
from hpctrain.cluster.ranks import flight_recorder

rank, port, timeout_s, logs = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
flight_recorder.prepare(Path(logs), rank)
if os.environ.get("OWN_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)

import torch
import torch.distributed as dist
from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.distributed.group import process_group
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.errors import DataError
from tests.gpu.device import needs_gpu

def command(argv):
    ranks = RankInfo("test", rank, rank, 0, 2, 2, 1, "127.0.0.1", port)
    with process_group(ranks, ParallelConfig(device="cuda", timeout_s=timeout_s)) as device:
        print("device", device, flush=True)
        value = torch.ones(1, device=device)
        dist.all_reduce(value)
        assert value.item() == 2
        {program}
    return 0

cli._dispatch = command
cli.main()
"""


def two_ranks(
    folder: Path, program: str, timeout_s: int, limit_s: float, **env: str
) -> list[tuple[int, str]]:
    """Run `program` as two ranks. Ranks that run after `limit_s` seconds are killed.

    Returns:
        The exit code and the output of each rank; the code is -9 if it was killed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    code = RANK.replace("{program}", program)
    files = [folder / f"7_1.rank{rank}.log" for rank in range(2)]
    processes = []
    for rank, file in enumerate(files):
        with file.open("w") as output:
            words = [sys.executable, "-c", code, str(rank), port, str(timeout_s), str(folder)]
            environment = os.environ | env
            processes.append(subprocess.Popen(words, stdout=output, stderr=output, env=environment))
    end = time.monotonic() + limit_s
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [(p.wait(), file.read_text()) for p, file in zip(processes, files, strict=True)]


@two_gpus
def test_a_rank_that_fails_ends_while_its_peer_waits(tmp_path: Path) -> None:
    program = f"if rank: raise DataError('of mine')\n        {ALL_REDUCE}"
    (waits, _), (fails, said) = two_ranks(tmp_path, program, 600, 120)
    assert (fails, "error: of mine" in said) == (DataError.exit_code, True)
    assert waits == -signal.SIGKILL  # here nobody ends it, as Slurm and torchrun do


@two_gpus
def test_a_timeout_of_nccl_leaves_what_the_verdict_reads(tmp_path: Path) -> None:
    program = f"if rank: time.sleep(300)\n        {ALL_REDUCE}"
    (code, said), _ = two_ranks(tmp_path, program, 20, 200)
    assert code == -signal.SIGABRT, said
    assert (tmp_path / f"{flight_recorder.PREFIX}0").stat().st_size
    told = flight_recorder.timeout(tmp_path, "7_1")
    assert told.startswith("ALLREDUCE number "), told
    assert "has timed out on rank 0" in told


@two_gpus
@pytest.mark.parametrize("own", [True, False])
def test_each_rank_has_a_gpu_of_its_own(own: bool, tmp_path: Path) -> None:
    program = "print(torch.cuda.get_device_properties(device).uuid)"
    # With OWN_GPU, each rank sees another one, as with --gpus-per-task.
    results = two_ranks(tmp_path, program, 60, 120, OWN_GPU="1" if own else "")
    assert [code for code, _ in results] == [0, 0], results
    names = [text.split("device ")[1].split()[0] for _, text in results]
    assert names == (["cuda:0", "cuda:0"] if own else ["cuda:0", "cuda:1"])
    assert len({text.split()[-1] for _, text in results}) == 2


def test_two_ranks_on_one_gpu_are_refused(tmp_path: Path) -> None:
    for code, said in two_ranks(tmp_path, "pass", 60, 120, CUDA_VISIBLE_DEVICES="0"):
        assert code == 2, said
        assert "ranks 0 (" in said
        assert "see the same 1 GPU: each rank needs one of its own" in said
