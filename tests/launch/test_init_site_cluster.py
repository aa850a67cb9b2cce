"""`init-site` on real Slurms: the development cluster as it is, and in five other shapes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from hpctrain.insight.site import site_file
from tests import cluster
from tests.conftest import Completed, only_run, run_json, run_module

pytestmark = pytest.mark.slurm
Train = Callable[..., Completed]


@pytest.mark.usefixtures("empty_queue")
def test_the_written_file_trains(train: Train, tmp_path: Path) -> None:
    done = run_module("hpctrain", "init-site", cwd=tmp_path)
    file = tmp_path / "conf/site/mine.yaml"
    assert done.stdout == file.read_text()
    site = site_file.read(file)
    assert (site.partition, site.gpu_option) == ("batch", "gpus-per-node")
    assert "launch.tasks_per_node=2 launch.gpus_per_node=2 launch.cpus_per_task=4" in done.stdout
    assert (
        "all that could be checked fits"
        in run_module("hpctrain", "init-site", "--check", cwd=tmp_path).stdout
    )
    own = (f"--config-dir={tmp_path}/conf", "site=mine", "launch.mem_gb=1", "tracking=off")
    train(
        "-m",
        *own,
        "train.max_steps=2",
        "launch.wait=true",
        "launch.gpus_per_node=1",
        "parallel.device=cpu",
    )
    assert run_json(only_run(tmp_path))["state"] == "finished"
    file.write_text(file.read_text().replace("partition: batch", "partition: gone"))
    done = run_module("hpctrain", "init-site", "--check", cwd=tmp_path, code=2)
    assert "site.partition: there is no gone for you, but batch, preemptible" in done.stdout


SHAPES: dict[str, dict[str, list[str]]] = yaml.safe_load(
    Path(__file__).with_name("shapes.yaml").read_text()
)


@pytest.fixture
def shaped(
    slurm_cluster: object, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[str]], None]]:
    """A function that starts a second cluster, with these lines in its slurm.conf."""
    folder, net = f"/var/tmp/hpctrain-test-shape-{cluster.number()}", f"10.78.{cluster.number()}"
    monkeypatch.setenv(cluster.SETTING, f"{folder}:{net}.0/24")

    def start(lines: list[str]) -> None:
        given = [word for line in lines for word in ("--set", line.format(net=net))]
        up = cluster.tool("up", "--nodes", "2", *given)
        assert up.returncode == 0, up.stderr
        monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")

    cluster.tool("down")
    yield start
    cluster.tool("down")


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape(shape: str, shaped: Callable[[list[str]], None], tmp_path: Path) -> None:
    wanted = SHAPES[shape]
    shaped(wanted.get("set", []))
    for command in wanted.get("then", []):
        cluster.slurm(*command.split())
    done = run_module("hpctrain", "init-site", *wanted.get("given", []), cwd=tmp_path)
    assert [text for text in wanted["says"] if text not in done.stdout] == []
    done = run_module("hpctrain", "init-site", "--check", cwd=tmp_path)
    assert "all that could be checked fits" in done.stdout
