"""`parallel.weights=auto`: from the measured speeds of the ranks, or refused with the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.frozen import load
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.estimates import like_runs, node_weights
from hpctrain.estimates.measured_run import measured_run
from hpctrain.estimates.node_weights import _best
from hpctrain.runs.freeze import check
from tests import cluster
from tests.bounds import EXACT
from tests.conftest import Completed, journal_metrics, run_json
from tests.conftest import runs as runs_of

WORDS = ("train.log_every=5", "train.max_steps=44", "tracking.upload=false")
Train = Callable[..., Completed]


def test_whole_numbers_that_shorten_the_step() -> None:
    assert _best([1.0, 1.0], range(3, 17)) == [1, 1]
    assert _best([1.0, 1.1], range(3, 17)) == [1, 1]
    assert _best([1.0, 2.0], range(3, 17)) == [2, 1]
    assert _best([3.0, 1.0], [4, 8, 16]) == [1, 3]  # not 2 and 6, which is as fast
    assert _best([1.0, 2.0], [4, 8]) == [3, 1]  # the sum has to divide the batch
    assert _best([1.0, 1.6], [3, 5, 8, 16]) == [2, 1]  # [5, 3] would save a few percent more
    assert _best([1.0, 2.0, 1.0], range(4, 25)) == [2, 1, 2]
    assert _best([1.0, 2.0], []) == [1, 1]


@pytest.fixture
def measured(reference: Callable[..., Path], tmp_path: Path) -> Path:
    """A run as if two nodes with two ranks each had trained it, the second half as fast."""
    run = tmp_path / "runs" / "measured"
    shutil.copytree(reference(*WORDS), run)
    record = json.loads((run / "run.json").read_text())
    record["attempts"][-1] |= {"world_size": 4, "nodes": 2, "hosts": ["node1", "node2"]}
    record["rank_s"] = [0.9e-3, 1e-3, 2.1e-3, 2.2e-3]
    (run / "run.json").write_text(json.dumps(record))
    like_runs._candidates.cache_clear()
    measured_run.cache_clear()
    return run


@pytest.fixture
def config_of(composer: Composer, digits: Path, measured: Path) -> Callable[..., Config]:
    """A function that returns the config of another run beside the measured one."""
    where = [f"output_dir={measured.parent}", f"data.path={digits}"]
    size = ["launch.nodes=2", "launch.tasks_per_node=2", "train.global_batch_size=96"]
    return lambda *words: composer.typed(["experiment=digits", *where, *size, *words])


def test_the_numbers_are_in_the_config(
    measured: Path, config_of: Callable[..., Config], tmp_path: Path
) -> None:
    config = config_of("parallel.weights=auto", "seed=3")
    name = check(config).name
    assert config.parallel.weights == [2, 1]
    assert config.parallel.weights_hosts == ["node1", "node2"]
    assert "is [2, 1], for the nodes node1,node2 in this order" in node_weights.note(config)
    # The run has the same name as one with numbers, and as one without.
    assert check(config_of("seed=3")).name == name
    named = config_of(f"parallel.weights=auto:{measured}", "seed=3")
    check(named)
    assert named.parallel.weights == [2, 1]
    bench = tmp_path / "bench.json"
    setup = {"nodes": 2, "model": config.model, "precision.compute": "fp32"}
    bench.write_text(json.dumps({"setup": setup, "facts": {"rank_s": [1, 1, 1, 1.01]}}))
    alike = config_of(f"parallel.weights=auto:{bench}")
    check(alike)
    assert (alike.parallel.weights, alike.parallel.weights_hosts) == (None, [])
    assert "the nodes are alike" in node_weights.note(alike)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch.nodes=1"], "parallel.weights=auto with launch.nodes=1: the weights are those of"),
        (["launch.nodes=3"], "(measured had 4 ranks on 2 nodes); train 40 steps with equal shares"),
        (["model.hidden=[8]"], "tells how fast each rank is (no run there has measured this model"),
        (["precision=bf16"], "(measured has the same model, but precision.compute is bf16, and th"),
        (["parallel.weights=auto:nowhere"], "nowhere: no run directory"),
        (["parallel.weights=auto:bench.json"], "bench.json: it has measured {'_target_': 'other'}"),
        (["parallel.weights=auto:alone.json"], "alone.json: the ranks were not measured one by on"),
        (["parallel.weights=auto:junk.json"], "junk.json: not a file of bench --save ("),
        (["parallel.weights=automatic"], "for each node, such as [2, 1], or auto, or auto:RUN"),
        (["parallel.weights=[2.5,1]"], "it must be a number from 1 to 1000 for each node"),
    ],
)
def test_refused(
    config_of: Callable[..., Config],
    tmp_path: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    own = config_of().model
    for name, model in (("bench", {"_target_": "other"}), ("alone", own)):
        setup = {"nodes": 2, "model": model, "precision.compute": "fp32"}
        Path(f"{name}.json").write_text(json.dumps({"setup": setup, "facts": {}}))
    Path("junk.json").write_text("[]")
    with pytest.raises(ConfigError) as caught:
        check(config_of("parallel.weights=auto", *words))
    assert message in str(caught.value)


def test_a_run_that_has_not_measured_its_ranks(
    measured: Path, config_of: Callable[..., Config]
) -> None:
    record = json.loads((measured / "run.json").read_text())
    del record["rank_s"]
    (measured / "run.json").write_text(json.dumps(record))
    for form in ("auto", f"auto:{measured}"):
        with pytest.raises(ConfigError, match="its ranks were not measured one by one: a run does"):
            check(config_of(f"parallel.weights={form}"))


# The second rank computes three times as long; a thread on a core, so that the work is counted.
SLOW = """\
import os, time
from hpctrain.tasks import Classification

class Slow(Classification):
    def __call__(self, model, batch):
        if model.training:
            rank = int(os.environ.get("SLURM_PROCID", 0))
            end = time.thread_time() + (0.003, 0.009)[rank] * len(batch["image"])
            while time.thread_time() < end:
                pass
        return super().__call__(model, batch)
"""


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("empty_queue")
def test_two_nodes_of_which_one_is_slow(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_task.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    common = ("task._target_=slow_task.Slow", "train.log_every=5", "tracking.upload=false")
    common += ("precision=fp64",)
    shape = (*common, "launch.nodes=2", "train.max_steps=30")
    train("-m", *shape)
    cluster.wait_for_end(cluster.job_ids(tmp_path / "runs"))
    (equal,) = runs_of(tmp_path / "runs")
    fast, slow = run_json(equal)["rank_s"]
    assert fast >= 0.003
    assert slow >= 0.009
    # The step is as long as the work of the slower node.
    other = f"output_dir={tmp_path}/auto"
    said = train("-m", *shape, f"parallel.weights=auto:{equal}", other).stderr
    config = load(runs_of(tmp_path / "auto")[0] / "config.yaml")
    first, second = config.parallel.weights
    assert first > second
    assert f"parallel.weights=auto is [{first}, {second}], for the nodes node1,node2" in said
    cluster.wait_for_end(cluster.job_ids(tmp_path / "auto"))
    (weighted,) = runs_of(tmp_path / "auto")
    steps = [measured_run(run).step_s for run in (equal, weighted)]
    print(f"weights {first}, {second}: a step took {steps[0]:.3f} s, now {steps[1]:.3f} s")
    assert max(first * fast, second * slow) / (first + second) < 0.75 * max(fast, slow) / 2
    # The losses are those of one process.
    train(*common, "train.max_steps=30", f"output_dir={tmp_path}/alone", **no_sbatch)
    (alone,) = runs_of(tmp_path / "alone")
    for step in range(5, 31, 5):
        theirs = journal_metrics(alone)["train/loss", step]
        assert journal_metrics(weighted)["train/loss", step] == pytest.approx(theirs, rel=EXACT)
