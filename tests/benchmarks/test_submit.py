"""Compares the time until a sweep is queued: hpctrain, hydra-submitit-launcher, a bare job array.

hpctrain checks each config and the data set, writes the frozen configs and copies the code. The
stock launcher only composes and pickles. The bare array shows the time of the scheduler alone. The
jobs are held, so none of them runs.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from hpctrain.yaml_file import conf_dir
from tests import cluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]

STOCK = """\
import sys
import hydra, submitit
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hpctrain.config.schema import Config

ConfigStore.instance().store(name="schema", node=Config)
# It would wait for the jobs; we measure until they are queued.
done = JobReturn()
done.status = JobStatus.COMPLETED
submitit.Job.results = lambda self: [done]

@hydra.main(version_base="1.3", config_path=sys.argv.pop(1), config_name="config")
def main(config):
    pass

main()
"""


@pytest.mark.parametrize("count", [10, 100, 1000])
@pytest.mark.parametrize("way", ["hpctrain", "stock", "bare"])
def test_until_queued(
    benchmark: BenchmarkFixture, digits: Path, tmp_path: Path, way: str, count: int
) -> None:
    benchmark.group = f"{count} configs"
    given = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    sweep = [*given, f"seed=range(0,{count // 2})", "optimizer.lr=1e-3,3e-3"]
    (tmp_path / "stock.py").write_text(STOCK)
    stock = ["hydra/launcher=submitit_slurm", "hydra/sweeper=basic"]
    stock += ["+hydra.launcher.additional_parameters={hold: true}", f"hydra.sweep.dir={tmp_path}/m"]
    command = {
        "hpctrain": [sys.executable, "-m", "hpctrain", "-m", *sweep, "+site.sbatch.hold=true"],
        "stock": [
            *(sys.executable, f"{tmp_path}/stock.py", str(conf_dir())),
            *("-m", *sweep, *stock),
        ],
        "bare": ["sbatch", f"--array=0-{count - 1}", "--hold", "--wrap", "true"],
    }[way]

    def submit() -> None:
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=280)

    benchmark.pedantic(submit, rounds=1)
    assert len(cluster.queue()) == count
