"""Tests staging on a real Slurm cluster: a folder on each node, two ranks per node, sbcast."""

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from hpctrain.shards.index import Index
from tests import cluster

pytestmark = pytest.mark.slurm

# The jobs always use the same nodes. Slurm could choose others while a node still ends its previous
# job, and shards that are staged on one node do not help a job on another.
NODES = ["node1", "node2", "node3"]
ON_NODES = (f"--nodes={len(NODES)}", f"--nodelist={','.join(NODES)}")

RANK = """
    import json, os, sys, time
    from pathlib import Path
    from hpctrain.data.places.broadcast import broadcast
    from hpctrain.data.places.origin import load_index
    from hpctrain.data.places.placement import open_place
    from hpctrain.data.places.verification import verified

    source, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])

    def barrier(name):
        (out / f"{name}.{rank}").touch()
        while len(list(out.glob(f"{name}.*"))) < ranks:
            time.sleep(0.01)

    shards = load_index(source).shards
    stage = open_place(source, "node", shards)
    place = verified(stage, "first_use", source, shards)
    barrier("ready")
    if mode == "sbcast" and rank == 0:
        broadcast(stage.folder, source, shards)
    barrier("go")
    place.plan(shards)
    paths = [place.path(shard) for shard in shards]
    report = {
        "node": os.environ["SLURMD_NODENAME"],
        "folder": str(stage.folder),
        "copied": stage.copied_bytes,
        "here": sorted(f.stat().st_size for f in stage.folder.iterdir() if len(f.name) == 32),
        "files": sorted({path.stat().st_ino for path in paths}),
    }
    (out / f"report.{rank}").write_text(json.dumps(report))
    barrier("end")
"""


@pytest.fixture(autouse=True)
def nothing_staged(empty_queue: None) -> None:
    """Empty the depots of the nodes."""
    cluster.slurm("srun", *ON_NODES, "rm", "-rf", str(depot()))


def depot() -> Path:
    """Return the folder of the depot. FOLDER/scratch is a different folder on each node."""
    scratch = Path(os.environ["SLURM_CONF"]).parent / "scratch"
    return scratch / f"hpctrain-stage-{os.geteuid()}"


def stage_on_nodes(digits: Path, out: Path, mode: str) -> dict[str, list[dict[str, object]]]:
    """Stage on NODES with two ranks each, and return the reports of the ranks by node."""
    out.mkdir()
    program = out / "rank.py"
    program.write_text(textwrap.dedent(RANK))
    shape = (*ON_NODES, "--ntasks-per-node=2", f"--export=ALL,TMPDIR={depot().parent}")
    cluster.slurm(
        *("srun", *shape, sys.executable, str(program), str(digits), str(out), mode), timeout=120
    )
    reports: dict[str, list[dict[str, object]]] = {}
    for file in out.glob("report.*"):
        report = json.loads(file.read_text())
        reports.setdefault(report["node"], []).append(report)
        assert report["folder"] == str(depot())
    assert {node: len(ranks) for node, ranks in reports.items()} == dict.fromkeys(NODES, 2)
    return reports


def test_each_node_copies_each_shard_once(digits: Path, tmp_path: Path) -> None:
    sizes = sorted(shard.bytes for shard in Index.load(digits).shards)
    for mode, copies in [("first", sum(sizes)), ("again", 0)]:
        reports = stage_on_nodes(digits, tmp_path / mode, mode)
        for node, ranks in reports.items():
            print(mode, node, [rank["copied"] for rank in ranks])
            assert sum(int(str(rank["copied"])) for rank in ranks) == copies
            assert ranks[0]["here"] == ranks[1]["here"] == sizes
            assert ranks[0]["files"] == ranks[1]["files"]
        # The nodes share no files.
        files = [tuple(ranks[0]["files"]) for ranks in reports.values()]  # type: ignore[arg-type]
        assert len(set(files)) == len(NODES)


def test_sbcast_brings_the_shards_to_every_node(digits: Path, tmp_path: Path) -> None:
    sizes = sorted(shard.bytes for shard in Index.load(digits).shards)
    for ranks in stage_on_nodes(digits, tmp_path / "sbcast", "sbcast").values():
        assert [rank["copied"] for rank in ranks] == [0, 0]
        assert ranks[0]["here"] == ranks[1]["here"] == sizes
