"""Two ranks, in processes of their own, do work that takes longer than a collective may."""

import textwrap
from pathlib import Path

import pytest

from tests.conftest import Completed
from tests.distributed.programs import end, free_port, start

# The ranks import torch at different speeds. Both wait for each other before the process group is
# formed, because its timeout also holds for the forming.
START = """
    import torch
    import os, signal, sys, time
    from pathlib import Path
    from hpctrain.config.schema import ParallelConfig
    from hpctrain.engine.distributed.group import process_group
    from hpctrain.engine.distributed.long_work import long_work
    from hpctrain.cluster.ranks.ranks import RankInfo
    from hpctrain.config.rules.degrees import Degrees
    from hpctrain.engine.building.build_data import DataBuilder
    from hpctrain.engine.building.instantiate import instantiate
    from hpctrain.engine.parallel.mesh import Mesh

    rank, port, folder, timeout_s = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), 4
    ranks = RankInfo("test", rank, rank, 0, 2, 2, 1, "127.0.0.1", port)

    def group():
        (folder / f"started.{rank}").touch()
        while not (folder / f"started.{1 - rank}").exists():
            time.sleep(0.01)
        config = ParallelConfig(device="cpu", timeout_s=timeout_s)
        return process_group(ranks, config, folder=folder)
"""


def two_ranks(folder: Path, program: str, **env: str) -> list[Completed]:
    """Run START and `program` as rank 0 and rank 1."""
    folder.mkdir(exist_ok=True)
    both, port = textwrap.dedent(START) + textwrap.dedent(program), free_port()
    processes = [start(folder, "one_rank", both, rank, port, **env) for rank in range(2)]
    return [end(process) for process in processes]


def test_either_rank_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    program = """
    with group():
        for slow in (0, 1):
            with long_work("slow"):
                if rank == slow:
                    time.sleep(1.5 * timeout_s)
                    (folder / f"{rank} is done").touch()
            assert (folder / f"{slow} is done").exists()
    """
    for rank in two_ranks(tmp_path, program):
        assert rank.returncode == 0, rank.stderr


@pytest.mark.parametrize(
    ("victim", "message"),
    [(0, "verifying: rank 0 is gone"), (1, "verifying: rank 1 has given no sign of life for 4 s")],
)
def test_a_dead_rank_is_noticed(tmp_path: Path, victim: int, message: str) -> None:
    program = f"""
    with group(), long_work("verifying"):
        if rank == {victim}:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = two_ranks(tmp_path, program)
    assert done[victim].returncode == -9
    assert done[1 - victim].returncode == 1
    assert f"DistributedError: {message}" in done[1 - victim].stderr


def test_the_other_ranks_know_why_one_failed(tmp_path: Path) -> None:
    program = """
    with group(), long_work("verifying"):
        if rank == 1:
            raise ValueError("shard 7 is changed")
    """
    first, second = two_ranks(tmp_path, program)
    message = "DistributedError: verifying: rank 1 failed: ValueError: shard 7 is changed"
    assert message in first.stderr
    assert "ValueError: shard 7 is changed" in second.stderr
