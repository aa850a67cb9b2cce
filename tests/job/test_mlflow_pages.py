"""MLflow's pages of a run, a sweep and a failed run, as people see them in a browser.

HPCTRAIN_SCREENSHOTS=FOLDER keeps a picture of each page, light and dark.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hpctrain.tracking import samples
from hpctrain.tracking.page.links import experiment_page, run_page
from tests.conftest import Completed, run_json, runs
from tests.tracking.browser import Browser, chromium
from tests.tracking.mlflow_server import MlflowServer

Train = Callable[..., Completed]


@pytest.fixture
def server(store: Path, tmp_path: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path, store)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(chromium() is None, reason="NO BROWSER TEST: apt-get install chromium")
def test_the_pages_of_a_sweep_a_run_and_a_failed_run(
    train: Train,
    digits: Path,
    store: Path,
    server: MlflowServer,
    tmp_path: Path,
    no_sbatch: dict[str, str],
) -> None:
    data = shutil.copytree(digits, tmp_path / "my-digits")
    train(
        *("-m", f"data.path={data}", "optimizer.lr=1e-2,1e10", "train.max_steps=20"),
        *("train.nonfinite=stop", "tracking.drain_s=400", "monitor.every_s=0.5"),
        code=4,
        **no_sbatch,
    )
    good, bad = sorted(runs(tmp_path / "runs"), key=lambda run: run_json(run)["state"] == "failed")
    # A second node, as the monitor there would write its samples.
    writer = samples.Writer(samples.folder(good) / "node2.jsonl")
    writer.write(1e9, metrics={"gpu_0_power_usage_watts": 321.0}, facts={"gpu_0": "NVIDIA H100"})
    writer.close()
    for run in (good, bad):
        sync = [sys.executable, "-m", "hpctrain", "status", "--upload", str(run)]
        subprocess.run(sync, check=True, stdout=subprocess.DEVNULL)

    with closing(sqlite3.connect(store)) as database:
        query = "SELECT name, run_uuid, artifact_uri, experiment_id FROM runs"
        found = database.execute(query).fetchall()
    ids = {name: run_id for name, run_id, *_ in found}
    (number,) = {str(experiment) for *_, experiment in found}
    (parent,) = [name for name in ids if name.startswith("sweep ")]
    best, failed = f"{good.name} lr=0.01", f"{bad.name} lr=10000000000.0"
    assert sorted(ids) == sorted([parent, best, failed])
    server.wait()

    def page(name: str, tab: str = "") -> str:
        address = run_page(server.uri, number, ids[name])
        return address.replace("?", f"/{tab}?") if tab else address

    pictures = os.environ.get("HPCTRAIN_SCREENSHOTS")
    with Browser(tmp_path) as browser:

        def see(address: str, *texts: str, click: str = "", shot: str = "") -> str:
            browser.open(address)
            if click:
                browser.click(click)
            shown = browser.wait_for(*texts)
            if pictures and shot:
                browser.screenshot(Path(pictures, f"{shot}.png"))
            return shown

        # The address opens the table of training runs, and not the traces of a language model.
        see(
            experiment_page(server.uri, number), "Run Name", parent, "3 matching runs",
            shot="experiment",
        )  # fmt: skip
        see(
            page(parent), "1 of 2 finished, 1 failed", f"Best: {best} with val/accuracy", failed,
            "gradient is not finite since step", shot="sweep",
        )  # fmt: skip
        see(
            page(parent, "artifacts"), "View as table", "FINISHED", "FAILED", "0.01",
            click="sweep.json", shot="sweep-table",
        )  # fmt: skip
        see(
            page(best), best, "optimizer.lr", "Resume, status and logs:", "Finished",
            "my-digits (", "hpctrain.hosts", "hpctrain.node.node2", parent, shot="run",
        )  # fmt: skip
        names = [path.stem for path in samples.folder(good).glob("*.jsonl")]
        assert len(names) == 2
        see(
            page(best, "system-metrics"), *(f"system/{name}" for name in names),
            "gpu_0_power_usage_watts", shot="system-metrics",
        )  # fmt: skip
        see(
            page(best, "artifacts"), "config.yaml", "checkpoints.json", "logs",
            shot="artifacts",
        )  # fmt: skip
        see(
            page(failed), "Failed: gradient is not finite since step", "hpctrain.reason",
            shot="failed",
        )  # fmt: skip
    if pictures:
        with Browser(tmp_path / "dark", dark=True) as browser:
            for shot, name, text in (("sweep", parent, "Best:"), ("failed", failed, "Failed:")):
                browser.open(page(name))
                browser.wait_for(text)
                browser.screenshot(Path(pictures, f"{shot}-dark.png"))
