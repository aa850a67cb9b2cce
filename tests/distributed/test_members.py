"""Somebody else in the network takes the place of a rank, and gets nothing: real attacks."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hpctrain.cluster.ranks import run_secret
from hpctrain.engine.distributed import members, objects
from hpctrain.errors import DistributedError
from tests.distributed.programs import end, free_port, start
from tests.ranks import RanksError, run_ranks

# A rank of a run. It must fail before it receives any object.
VICTIM = """
    import sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from hpctrain.config.schema import ParallelConfig
    from hpctrain.engine.distributed.group import process_group
    from hpctrain.cluster.ranks.ranks import RankInfo

    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ranks = RankInfo("slurm", rank, rank, 0, 2, 2, 1, "127.0.0.1", port, job_id="1234")
    with process_group(ranks, ParallelConfig(device="cpu", timeout_s=20), folder=folder):
        received = [None, None]
        dist.all_gather_object(received, "loss")
"""
# Another user knows the number of the job and the port, but not the secret. As rank 0 it serves the
# store, too: it was first on the port.
STRANGER = """
    import json, os, sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist

    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

    class Code:
        def __reduce__(self):
            return os.mkdir, (f"{folder}/the code of somebody else has run",)

    while True:
        try:
            store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=20), False)
            break
        except dist.DistError:
            time.sleep(0.01)
    # The store lists all its keys, so the name that they begin with is no secret.
    while not (keys := [key for key in store.list_keys() if "hpctrain/" in key]):
        time.sleep(0.01)
    prefix = "/".join(keys[0].removeprefix("/").split("/")[:2])
    store = dist.PrefixStore(prefix, store)
    # It also says what a rank says about its devices, and what rank 0 answers.
    store.set(f"devices/{rank}", json.dumps({"host": "node9", "gpus": []}))
    if rank == 0:
        store.set("devices/answer", json.dumps({"indices": [0, 0]}))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.zeros(1))
    print("joined", flush=True)
    try:
        for _ in range(2):  # what the victim sees as a nonce and as a proof
            own = torch.randint(256, (32,), dtype=torch.uint8)
            dist.all_gather([torch.empty_like(own) for _ in range(2)], own)
        dist.all_gather_object([None, None], Code())
    except RuntimeError:
        pass  # the victim has left
"""


@pytest.mark.parametrize("place", [0, 1])
def test_a_stranger_in_the_place_of_a_rank(tmp_path: Path, place: int) -> None:
    port, lo = free_port(), {"GLOO_SOCKET_IFNAME": "lo"}
    run_secret.make(tmp_path)
    stranger = start(tmp_path, "stranger", STRANGER, place, port, **lo)
    victim = end(start(tmp_path, "victim", VICTIM, 1 - place, port, **lo))
    attack = end(stranger)
    assert attack.stdout == "joined\n", attack.stderr
    assert victim.returncode != 0
    assert f"in the place of rank {place} (of 2), seen from rank {1 - place}, is a proc" in (
        victim.stderr
    )
    assert not (tmp_path / "the code of somebody else has run").exists()


class Code:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def signed(forged: Path) -> list[Any]:
    """Exchange an object as DCP does; then rank 1 sends one without a signature."""
    key = members.check(b"k" * 32)
    found: list[Any] = [None, None]
    with members.signed_objects(key):
        dist.all_gather_object(found, {"rank": dist.get_rank()})
        if dist.get_rank() == 0:
            with pytest.raises(DistributedError, match="not signed with the key of this process"):
                dist.recv_object_list([None], src=1)
    if dist.get_rank() == 1:
        # As somebody who has taken over the connection; the signature is of another key.
        with members.signed_objects(b"x" * 32):
            dist.send_object_list([Code(forged)], dst=0)
    return found


def test_objects_are_not_unpickled_without_the_signature(tmp_path: Path) -> None:
    assert run_ranks(signed, 2, tmp_path / "made") == [[{"rank": 0}, {"rank": 1}]] * 2
    assert not (tmp_path / "made").exists()
    before = dist.distributed_c10d._pickler, dist.distributed_c10d._unpickler
    assert before == (pickle.Pickler, pickle.Unpickler)


def with_own_secret() -> str:
    try:
        members.check(bytes([dist.get_rank() == 2]) * 32)
    except DistributedError as error:
        return str(error)
    return ""


def test_a_rank_with_another_secret_is_named_by_all() -> None:
    said = run_ranks(with_own_secret, 3)
    for rank in (0, 1):
        assert f"in the place of rank 2 (of 3), seen from rank {rank}, is a process" in said[rank]
    assert "in the place of rank 0, 1 (of 3), seen from rank 2, is a process" in said[2]


def as_json() -> list[Any]:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    every = objects.all_gather(("x" * 10 * rank, rank, None))
    own = objects.broadcast({"from": rank}, 2)
    inner = objects.broadcast(rank, 1, pair) if rank else None
    return [every, own, inner]


def test_values_as_json() -> None:
    every = [["x" * 10 * rank, rank, None] for rank in range(3)]
    found = run_ranks(as_json, 3)
    assert found == [[every, {"from": 2}, 2 if rank else None] for rank in range(3)]


def not_json() -> None:
    objects.all_gather(Path("x"))


def test_what_json_has_not_is_an_error_of_the_sender() -> None:
    with pytest.raises(RanksError, match="PosixPath is not JSON serializable"):
        run_ranks(not_json, 1)


def test_the_secret_is_private_and_stays(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        made = run_secret.make(tmp_path)
    finally:
        os.umask(before)
    file = tmp_path / "secret"
    assert len(made) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert run_secret.make(tmp_path) == run_secret.wait_for(tmp_path, 0) == made
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    # Others could read it, or it is damaged: there is a new one.
    file.chmod(0o640)
    again = run_secret.make(tmp_path)
    assert again != made
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("short")
    assert run_secret.make(tmp_path) not in (made, again)


def test_no_secret(tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match="rank 0 has not written the secret of the run with"):
        run_secret.wait_for(tmp_path, 0.05)
    with pytest.raises(DistributedError, match="secret: cannot be written"):
        run_secret.make(tmp_path / "nowhere")


def test_a_signature_is_for_one_purpose_and_one_division() -> None:
    signatures = {
        run_secret.sign(b"k", *parts)  # type: ignore[arg-type]
        for parts in (("a", "b", "c"), ("a", "bc"), ("ab", "c"), ("a", b"b", 1), ("a", "b", 11))
    }
    assert len(signatures) == 5
