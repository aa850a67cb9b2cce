"""A rank that fails ends at once; a program that is more than a rank goes on."""

import resource
import subprocess
import sys

import pytest
import torch.distributed as dist

from hpctrain.cluster.ranks import leaving
from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.distributed.group import process_group
from hpctrain.errors import DistributedError
from tests.steps import ALONE

# The teardown of a rank that waits for others, as that of NCCL does.
FAILS = """
import atexit, time
from hpctrain import cli, errors
from hpctrain.cluster.ranks import leaving

def fails(argv):
    leaving.leave_group_open()
    print("said")
    raise errors.{error}("of mine")

atexit.register(time.sleep, 1000)
cli._dispatch = fails
cli.main()
"""


@pytest.mark.parametrize(("error", "code"), [("DataError", 3), ("LateRankError", 5)])
def test_a_failed_rank_ends_at_once_with_the_code_of_its_error(error: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS.format(error=error)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "said\n", "error: of mine\n")


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_rank_that_aborts_leaves_a_core_dump_only_if_asked(
    debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    monkeypatch.setenv("HPCTRAIN_DEBUG", debug)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
        leaving.write_no_core_dump()
        limits = resource.getrlimit(resource.RLIMIT_CORE)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert limits == (before[1] if debug else 0, before[1])


def test_a_notebook_goes_on_after_a_training_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving.os, "_exit", lambda code: pytest.fail("the notebook would end"))
    for _ in range(2):
        with (
            pytest.raises(ValueError, match="of mine"),
            process_group(ALONE, ParallelConfig(device="cpu")),
        ):
            raise ValueError("of mine")
        assert not dist.is_initialized()
    with (
        pytest.raises(DistributedError, match="no process group"),
        process_group(ALONE, ParallelConfig(device="cpu", backend="nccl")),
    ):
        pass
    assert not dist.is_initialized()

    def fails(*_: object, **__: object) -> None:  # as NCCL: the last line has the reason
        raise dist.DistBackendError("NCCL error in: f:1, internal error\nLast error:\nno socket")

    monkeypatch.setattr(dist, "init_process_group", fails)
    with (
        pytest.raises(DistributedError, match=r"after 0 s \(.* Last error: no socket\)"),
        process_group(ALONE, ParallelConfig(device="cpu")),
    ):
        pass
    leaving.exit_at_once_if_group_is_open(1)
