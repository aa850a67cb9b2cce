"""When a collective operation times out, the error names the ranks that did not come."""

import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpctrain.config.schema import ParallelConfig
from hpctrain.data.loading.loader import Loader
from hpctrain.data.workers.pool import Workers, stacks
from hpctrain.distributed.group import process_group
from hpctrain.errors import LateRankError
from hpctrain.faults import collectives, late_ranks
from hpctrain.faults.collectives import Operation, Record, conclude
from hpctrain.faults.late_ranks import LateRanks
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.shards.field import Field
from tests.ranks import run_ranks

ALL, HOSTS = [0, 1, 2, 3], {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def record(rank: int, waits_in: Operation | None, **entered: int) -> Record:
    groups = {"all": ALL, "dp": [0, 2] if rank % 2 == 0 else [1, 3], "tp": [rank // 2 * 2] * 2}
    known = {name: groups[name] for name in entered}
    return Record(rank, HOSTS[rank], 7, "data.py:3 in read", waits_in, entered, known, [], [])


def reduction(number: int, group: str = "all", ranks: list[int] = ALL) -> Operation:
    return Operation("all_reduce", group, number, ranks)


def test_a_silent_rank_and_one_that_is_still_at_work_are_late() -> None:
    waits = {rank: record(rank, reduction(5), all=5) for rank in (0, 1)}
    said = conclude({**waits, 3: record(3, None, all=4)}, HOSTS, own=1)
    assert said == (
        "after step 7: ranks 2 (n1), 3 (n1) did not arrive at all_reduce number 5 of all ranks; "
        "2 ranks wait for it; rank 2 does not answer; rank 3 is at data.py:3 in read"
    )


def test_a_rank_that_waits_for_a_late_one_is_not_late() -> None:
    # Rank 2 waits for rank 3; so it did not come to the reduction in which rank 0 waits.
    records = {
        0: record(0, reduction(9, "dp", [0, 2]), all=5, dp=9),
        1: record(1, reduction(9, "dp", [1, 3]), all=5, dp=9),
        2: record(2, reduction(4, "tp", [2, 3]), all=5, dp=8),
        3: record(3, None, all=5, dp=8),
    }
    said = conclude(records, HOSTS, own=0)
    assert (
        "rank 3 (n1) did not arrive at all_reduce number 9 of ranks 1, 3; 3 ranks wait for it"
        in said
    )
    # Without such a rank, the operations differ, and each is told.
    records[3] = record(3, Operation("broadcast", "all", 5, ALL), all=5, dp=8)
    said = conclude(records, HOSTS, own=0)
    assert "ranks 2 (n1), 3 (n1) did not arrive" in said
    assert "rank 3 waits in broadcast number 5 of all ranks" in said


def test_all_ranks_have_entered() -> None:
    records = {rank: record(rank, reduction(5), all=5) for rank in ALL}
    said = conclude(records, HOSTS, own=2)
    assert "all ranks have entered all_reduce number 5 of all ranks, but not all have got" in said


def test_groups_that_are_made_later_have_the_same_timeout() -> None:
    """Those of a mesh, for example; torch gives them 30 minutes, NCCL's 10."""
    alone = RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    with process_group(alone, ParallelConfig(device="cpu", timeout_s=77)):
        dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
        assert collectives._entries()[-1]["timeout_ms"] == 77_000


def late(folder: str) -> str | None:
    """Be late on rank 1; return the error of this rank."""
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    group = dist.new_group(list(range(3)), timeout=timedelta(seconds=4))
    records = [Path(folder, late_ranks.FOLDER, f"rank{other}.json") for other in (0, 2)]
    value = torch.ones(2)
    try:
        with LateRanks(Path(folder), rank, 3, store, 60, "n{}".format) as ranks:
            ranks.step = lambda: 12
            dist.all_reduce(value)
            while rank == 1 and not all(file.exists() for file in records):
                time.sleep(0.1)
            dist.all_reduce(value, group=group)
    except LateRankError as error:
        return str(error)
    except RuntimeError:
        return None
    return None


def test_a_rank_that_sleeps_says_where_it_is(tmp_path: Path) -> None:
    texts = run_ranks(late, 3, str(tmp_path))
    for text in (texts[0], texts[2]):
        assert text.startswith("after step 12: rank 1 (")
        assert "did not arrive at all_reduce number 1 of all ranks; 2 ranks wait for it" in text
        assert f"rank 1 is at {__file__}:" in text
        assert "in late (parallel.timeout_s=60" in text
    found = Record.read(tmp_path / late_ranks.FOLDER / "rank1.json")
    assert found is not None
    assert found.waits_in is None
    assert any("time.sleep(0.1)" in stack for stack in found.stacks)
    waiting = Record.read(tmp_path / late_ranks.FOLDER / "rank0.json")
    assert waiting is not None
    assert waiting.waits_in is not None
    assert any("dist.all_reduce(value, group=group)" in stack for stack in waiting.stacks)


TRANSFORM = """\
import os, time

def blocks(sample, random):
    while sample["x"] > 40 and not os.path.exists({go!r}): time.sleep(0.01)
    return sample
"""


class Numbers:
    """A source of 80 samples."""

    fields: ClassVar = {"x": Field("int64")}

    def __len__(self) -> int:
        return 80

    def read(self, indices: Any, out: Any = None) -> dict[str, Any]:
        return {"x": np.array(indices)}


def without_data(folder: str, workers: int, threads: int) -> str | None:
    """Wait on rank 1 for a batch whose transform waits for rank 0; return the rank's error."""
    sys.path.insert(0, folder)
    blocks = import_module("blocking").blocks
    rank, store, go = dist.get_rank(), distributed_c10d._get_default_store(), Path(folder, "go")
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    try:
        with (
            Workers(Numbers(), blocks, workers) as pool,
            LateRanks(Path(folder), rank, 2, store, 60, "n{}".format, stacks),
        ):
            dist.all_reduce(torch.ones(2), group=group)
            if rank == 1:
                options: Any = {"threads": threads, "workers": pool, "shuffle": False}
                batches = Loader(Numbers(), global_batch_size=8, **options)
                assert len(list(zip(range(9), batches, strict=False))) == 9
            dist.all_reduce(torch.ones(2), group=group)
    except LateRankError as error:
        go.touch()
        return str(error)
    except RuntimeError:
        return None
    finally:
        sys.path.remove(folder)
        del sys.modules["blocking"]
    return None


@pytest.mark.parametrize(
    ("workers", "threads"),
    [
        (1, 2),
        (0, 2),
        pytest.param(1, 0, marks=pytest.mark.slow),
        pytest.param(0, 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_waits_for_data_says_where_the_data_is_made(
    tmp_path: Path, workers: int, threads: int
) -> None:
    """In a worker process, in a thread of the loader, or in the main thread itself."""
    (tmp_path / "blocking.py").write_text(TRANSFORM.format(go=str(tmp_path / "go")))
    text, _ = run_ranks(without_data, 2, str(tmp_path), workers, threads)
    place = f"{tmp_path}/blocking.py:4 in blocks"
    if workers or threads:
        assert "rank 1 waits for data at" in text
    else:
        assert f"rank 1 is at {place}" in text
    if workers:
        assert re.search(
            rf"; worker 0 of the data \(process \d+\) with samples .* is at {place}", text
        )
    elif threads:
        assert f"a thread that reads is at {place}" in text
    found = Record.read(tmp_path / late_ranks.FOLDER / "rank1.json")
    assert found is not None
    assert any("blocking.py" in stack for stack in found.stacks)


def fails(folder: str) -> Any:
    """Raise an error of the program on every rank, within the context."""
    store = distributed_c10d._get_default_store()
    with pytest.raises(RuntimeError, match="of mine"), LateRanks(Path(folder), 0, 2, store, 1):
        raise RuntimeError("of mine")
    return [thread.name for thread in threading.enumerate()]


def test_other_errors_are_left_as_they_are(tmp_path: Path) -> None:
    for names in run_ranks(fails, 2, str(tmp_path)):
        assert "hpctrain-late-ranks" not in names
    assert not (tmp_path / late_ranks.FOLDER).exists()


def test_a_rank_whose_rank_0_has_gone_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the others until `parallel.timeout_s`. Its end is only noted here."""
    ended = threading.Event()
    monkeypatch.setattr(late_ranks, "end_at_once", lambda why: ended.set())
    monkeypatch.setattr(late_ranks, "_LEASE_S", 0.0)
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, 2, wait_for_workers=False)
    with LateRanks(tmp_path, 1, 2, store, 60, port=server.port):
        asks = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
                if one.family != socket.AF_UNIX and one.getpeername()[1] == server.port:
                    asks.append(one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        assert asks  # Linux asks whether rank 0 is there, on every connection to it
        assert all(asks)
        assert not ended.is_set()
        del server
        assert ended.wait(60)
