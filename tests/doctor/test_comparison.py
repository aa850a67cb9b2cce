"""Tests of what is compared over ranks and nodes, and of the hosts that jobs avoid."""

from dataclasses import replace
from pathlib import Path

from hpctrain.cluster.slurm import excluded_hosts
from hpctrain.cluster.slurm.script import JobOrder, sbatch_script
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.insight.doctor import comparison
from hpctrain.insight.doctor.checks.gpu_health import GpuFacts
from hpctrain.insight.doctor.command import settings
from hpctrain.insight.doctor.finding import Finding, at_fault, exclude, good, worst
from hpctrain.insight.doctor.measures import speeds
from hpctrain.insight.doctor.probe import Probe
from tests.doctor.asked import expected_of

GPU = GpuFacts("NVIDIA X1", "570.86.15", 80 << 30, 1980, 700.0, 18)
VERSIONS = {"torch": "2.7.1", "code": "abc", "system": "Linux-5.14"}


def look(node: int, **changes: object) -> Probe:
    figures = {"matmul_tflops": 700.0, "memory_gb_s": 3000.0}
    seen = Probe(f"node{node}", node, 0, VERSIONS, [GPU], [], figures)
    return replace(seen, **changes)  # type: ignore[arg-type]


def verdicts(looks: list[Probe]) -> dict[str, list[tuple[str, str]]]:
    return {
        host: [(one.check, one.result) for one in findings if one.result != "pass"]
        for host, findings in comparison.compared(looks).items()
    }


def test_the_node_is_named_that_differs() -> None:
    slow = {"matmul_tflops": 300.0, "memory_gb_s": 2100.0}
    looks = [
        look(0),
        look(1, versions=VERSIONS | {"torch": "2.6.0"}),
        look(2, gpus=[replace(GPU, power_w=350.0)], figures=slow),
        look(3),
        look(4, versions=VERSIONS | {"system": "Linux-5.15"}),
        look(5, gpus=[replace(GPU, name="NVIDIA A100")]),
    ]
    found = verdicts(looks)
    assert found == {
        "node0": [],
        "node1": [("same torch", "fail")],
        "node2": [
            ("same GPUs: power_w", "warn"),
            ("rank 2: matmul_tflops", "fail"),
            ("rank 2: memory_gb_s", "warn"),
        ],
        "node3": [],
        "node4": [("same system", "warn")],
        "node5": [("same GPUs: name", "fail")],
    }


def test_nodes_that_are_meant_to_differ() -> None:
    """Only GPUs of one kind are compared then, and one that is slow among its kind still fails."""
    old = replace(GPU, name="NVIDIA A100", driver="550.1", memory_bytes=40 << 30, nvlinks=12)
    slow = {"matmul_tflops": 250.0, "memory_gb_s": 1500.0}
    looks = [look(0), look(1), look(2, gpus=[old], figures=slow), look(3, gpus=[old], figures=slow)]
    assert {"fail"} <= {
        one.result for found in comparison.compared(looks).values() for one in found
    }
    assert (
        worst(f for found in comparison.compared(looks, mixed=True).values() for f in found)
        == "pass"
    )
    other = VERSIONS | {"InfiniBand": "1 x 100 Gb/sec"}
    figures = slow | {"matmul_tflops": 60.0}
    looks[3] = look(3, gpus=[old], versions=other, figures=figures)
    looks.append(look(4, gpus=[old], figures=slow))
    found = comparison.compared(looks, mixed=True)
    assert [one.check for one in found["node3"] if one.result in ("warn", "fail")] == [
        "rank 3: matmul_tflops"
    ]
    plain, weighted, several = Config(), Config(), Config()
    weighted.parallel.weights, several.site.partition = [2, 1], "a100,h100"
    assert [expected_of(each).mixed for each in (plain, weighted, several)] == [False, True, True]


def test_what_is_usual_among_equal_gpus() -> None:
    """A few megabytes that the driver has taken, and NVLinks that a board does not use."""
    board = replace(GPU, nvlinks=12)
    looks = [look(n, gpus=[replace(board, memory_bytes=(80 << 30) - n * 2**20)]) for n in range(3)]
    assert verdicts(looks) == {f"node{n}": [] for n in range(3)}
    looks[1] = look(1, gpus=[replace(board, nvlinks=11)])
    looks[2] = look(2, gpus=[replace(board, nvlinks=11)])
    assert verdicts(looks) == {
        "node0": [],
        **{f"node{n}": [("same GPUs: nvlinks", "fail")] for n in (1, 2)},
    }
    # A third card has no bridge, and a GPU does not tell what the others do.
    looks[1] = look(1, gpus=[replace(board, nvlinks=0, driver="580.1")])
    looks[2] = look(2, gpus=[GpuFacts(GPU.name)])
    assert verdicts(looks) == {
        "node0": [],
        "node2": [],
        "node1": [("same GPUs: driver", "warn"), ("same GPUs: nvlinks", "warn")],
    }


def test_gpus_that_each_rank_sees_alone_are_counted_over_the_node() -> None:
    def node(*seen: list[str], given: int = 4) -> list[tuple[str, str]]:
        looks = [
            look(0, rank=rank, local_rank=rank, uuids=uuids, gpus_given=given, peers=4)
            for rank, uuids in enumerate(seen)
        ]
        (findings,) = comparison.compared(looks).values()
        return [(one.result, one.found) for one in findings if one.check == "number of GPUs"]

    assert node(["a"], ["b"], ["c"], ["d"]) == [("pass", "4")]
    assert node(*[["a", "b", "c", "d"]] * 4) == [("pass", "4")]
    assert node(["a"], ["b"], ["c"], []) == [("fail", "3")]
    assert node(["a"], ["b"], ["c"], ["a"]) == [("fail", "3")]
    assert node(*[["a", "b", "c"]] * 4) == [("fail", "3")]
    assert node([], [], [], []) == [("fail", "0")]
    assert node(["a"], ["b"], ["c"]) == []  # the rank that has not answered is named by itself
    assert node(*[["a"]] * 4, given=1) == [("pass", "1")]  # one GPU for all, on purpose
    assert node(["a"], [], [], [], given=0) == []  # CPUs, or nobody says how many


def test_a_busy_cpu_is_not_a_slow_one() -> None:
    """Other work on a node costs time of the clock, so what a CPU reaches is only shown."""
    well = {"matmul_tflops": 0.2, "memory_gb_s": 20.0}
    busy = well | {"matmul_tflops": 0.02, "memory_gb_s": 2.0}
    looks = [look(n, gpus=[], figures=well) for n in range(3)]
    looks.append(look(3, gpus=[], figures=busy))
    assert verdicts(looks) == {f"node{n}": [] for n in range(4)}


def test_every_pair_of_nodes_meets_once() -> None:
    for count in (2, 3, 4, 5, 8):
        played = [pair for one in speeds.rounds(count) for pair in one]
        assert sorted(played) == [(a, b) for a in range(count) for b in range(a + 1, count)]
        for one in speeds.rounds(count):
            players = [player for pair in one for player in pair]
            assert len(players) == len(set(players))


def test_an_exclusion_ends_with_a_passed_check(tmp_path: Path) -> None:
    where = str(tmp_path)
    bad = Finding("GPU 0: ECC", "fail", "2 errors", "0", "Replace it.")
    warned = Finding("scratch", "warn", "5 GB", "10 GB", "Delete.")
    assert exclude(where, {"node1": [good("x", "y")]}) == {}
    assert not (tmp_path / "doctor").exists()
    found = exclude(where, {"node1": [bad], "node2": [bad], "node3": [warned]})
    assert found == {"node1": bad, "node2": bad}
    assert excluded_hosts.read(where)["node1"].why == "GPU 0: ECC: 2 errors"
    assert exclude(where, {"node1": [warned]}) == {}
    assert list(excluded_hosts.read(where)) == ["node2"]


def test_what_all_nodes_share_excludes_none_of_them(tmp_path: Path) -> None:
    full = Finding("scratch: free space", "fail", "0 GB", "10 GB", "Delete.")
    apart = Finding("communication", "fail", "timed out", "the ranks meet", "Look.")
    assert at_fault({"a": [full], "b": [full]}) == {}
    assert at_fault({"a": [full, apart], "b": [apart]}) == {"a": full}
    assert at_fault({"a": [full]}) == {"a": full}


def test_a_host_that_is_only_unlike_others_is_avoided_only_where_nodes_shall_be_alike(
    tmp_path: Path,
) -> None:
    unlike = Finding("same GPUs: name", "fail", "NVIDIA A100", "NVIDIA X1, as other GPUs", "Ask.")
    ill = Finding("GPU 0: ECC", "fail", "2 errors", "0", "Replace it.")
    exclude(str(tmp_path), {"node1": [unlike], "node2": [ill]})
    config = Config(output_dir=str(tmp_path))
    assert excluded_hosts.avoided(JobRequest.of(config)) == ["node2"]
    config.launch.nodes = 2
    assert excluded_hosts.avoided(JobRequest.of(config)) == ["node1", "node2"]
    config.parallel.weights = [2, 1]
    assert excluded_hosts.avoided(JobRequest.of(config)) == ["node2"]


def test_jobs_avoid_excluded_hosts(tmp_path: Path) -> None:
    config, _ = settings(["+site.sbatch.exclude='node[7-8]'", f"output_dir={tmp_path}"])
    folder = tmp_path / "array"
    assert "--exclude=node" not in sbatch_script(JobRequest.of(settings([])[0]), folder, 1)
    text = sbatch_script(
        JobRequest.of(config), folder, 1, order=JobOrder(exclude=["node2", "node3"])
    )
    assert '#SBATCH --exclude="node[7-8],node2,node3"' in text


def test_the_formula_of_nccl_tests() -> None:
    """A sum over 8 ranks moves 7/4 of the bytes over each link."""
    assert speeds.bus_bandwidth(10**9, 0.01, 8) == 175.0
    assert speeds.bus_bandwidth(10**9, 0.01, 2) == 100.0
