"""What people read on a run's page in MLflow, in real stores; and the files that it comes from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.commands.sync import main
from hpctrain.errors import TrackingError
from hpctrain.tracking import links, samples
from hpctrain.tracking.meta import Meta, Uploaded, is_uploaded
from hpctrain.tracking.page.images import save_image
from hpctrain.tracking.uploading import nodes
from tests import forkserver
from tests.conftest import ROOT
from tests.tracking.new_tracker import SYNC, new_tracker

Rows = Callable[..., list[tuple[Any, ...]]]
SECRET = "correct-horse-battery"
DATA = {
    "name": "digits",
    "digest": "xxh3_128:822cf840a8c8b40511f9a01daef9d30b",
    "source": "/data/digits",
    "context": "training",
    "samples": {"train": 1415},
    "fields": {"image": {"dtype": "uint8", "shape": [8, 8]}},
}


def write_run(run: Path) -> None:
    """Write the files that a run directory has beside its journal."""
    (run / "provenance").mkdir(parents=True)
    (run / "config.yaml").write_text(f"seed: 1\nnote: {SECRET}\n")
    (run / "provenance" / "git.json").write_text("[]\n")
    (run / "logs").mkdir()
    (run / "logs" / "7.rank0.log").write_text("x" * 70_000 + f"\nthe last line {SECRET}\n")
    (run / "logs" / "7.rank1.log").write_text("Traceback (most recent call last):\nOSError: it\n")
    (run / "logs" / "7.rank2.log").write_text("all is well here\n")
    writer = samples.SampleWriter(samples.folder(run) / "n01.jsonl")
    writer.write(1.0, facts={"kernel": "6.1"})
    writer.write(2.0, facts={"kernel": "6.1", "driver": "570"})
    writer.close()
    samples.SampleWriter(samples.folder(run) / "n02.jsonl").write(1.0, facts={"driver": "550"})
    (samples.folder(run) / "n01.idle").write_text("n01: gpu_0 below 5% for 30 minutes\n")


def test_what_belongs_to_a_run_is_on_its_page_once_and_without_secrets(
    database: Path, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    run = tmp_path / "r"
    write_run(run)
    tracker = new_tracker(run, database)
    tracker.start({"optimizer": {"lr": 0.1}}, {"hpctrain.command": f"how to go on, {SECRET}"})
    tracker.log_dataset(DATA)
    tracker.log_image("picture/one", np.eye(300, dtype=np.float32), step=3)
    tracker.log_image("picture/one", np.zeros((300, 300, 3), np.uint8), step=3)
    plot = run / "artifacts" / "data" / "plot.html"
    plot.parent.mkdir()
    plot.write_text("<b>plot</b>")
    tracker.log_file(plot)
    summary = run / "artifacts" / "model.txt"  # directly in the folder of artifacts
    summary.write_text("model")
    tracker.log_file(summary)
    vanished = run / "artifacts" / "data" / "gone.png"
    tracker.log_file(vanished)
    tracker.log_metrics({"loss": 1.0}, step=3)
    (run / "progress.json").write_text('{"metric": "val/f1", "metrics": {"val/f1": 0.5}}')
    tracker.finish("FAILED", "OSError: it")
    # The journal of somebody else could name a file that is not theirs.
    with (run / "journal" / "events.jsonl").open("a") as journal:
        stolen = {"kind": "artifact", "attempt": 1, "time": 1.0, "file": "../mlflow.db", "to": "x"}
        journal.write(json.dumps(stolen) + "\n")

    done = forkserver.run([*SYNC, str(run)], capture_output=True, text=True, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    assert f"{vanished.relative_to(run)} is not in MLflow: it has vanished" in done.stderr
    assert "../mlflow.db is not in MLflow: it is not in the run directory" in done.stderr
    assert rows("SELECT name, status FROM runs") == [("n", "FAILED")]
    assert rows("SELECT key, value FROM metrics") == [("loss", 1.0)]
    ((name, digest, context),) = rows(
        "SELECT datasets.name, digest, input_tags.value FROM inputs "
        "JOIN datasets ON source_id=dataset_uuid JOIN input_tags USING (input_uuid)"
    )
    assert (name, digest, context) == ("digits", "822cf840a8c8b40511f9a01daef9d30b", "training")
    tags = dict(rows("SELECT key, value FROM tags"))
    assert tags["hpctrain.command"] == "how to go on, ${oc.env:MY_API_KEY}"
    assert tags["hpctrain.reason"] == "OSError: it"
    assert tags["hpctrain.node.n01"] == "kernel=6.1, driver=570"
    assert tags["hpctrain.idle"] == "n01: gpu_0 below 5% for 30 minutes"
    assert tags["mlflow.loggedImages"] == "true"

    ((place,),) = rows("SELECT artifact_uri FROM runs")
    root = Path(place.removeprefix("file://"))
    content = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    small, image = sorted(name for name in content if name.startswith("images/"))
    assert image.startswith("images/picture~one+step+3+timestamp+")
    assert small == image.replace(".png", "+compressed.webp")
    assert sorted(set(content) - {image, small}) == [
        "config.yaml",
        "data/plot.html",
        "logs/7.rank0.log",
        "logs/7.rank1.log",
        "model.txt",
        "provenance/git.json",
    ]
    for name, path in content.items():
        assert SECRET not in path.read_text(errors="replace"), name
    log = content["logs/7.rank0.log"].read_text()
    assert log.startswith("... (only the last 64 KiB)")
    assert log.endswith("the last line ***\n")


def test_metrics_and_status_do_not_wait_for_the_place_of_the_artifacts(
    database: Path, tmp_path: Path, rows: Rows
) -> None:
    """The place is a folder that is not there yet."""
    blocked = tmp_path / "mlartifacts"
    blocked.touch()
    run = tmp_path / "r"
    write_run(run)
    tracker = new_tracker(run, database)
    tracker.start({"lr": 0.1}, {})
    tracker.log_image("picture/one", np.eye(30, dtype=np.float32), step=3)
    tracker.log_metrics({"loss": 1.0}, step=3)
    tracker.finish("FINISHED")

    with pytest.raises(TrackingError, match="not everything is uploaded"):
        main([str(run)])
    assert rows("SELECT name, status FROM runs") == [("n", "FINISHED")]
    assert rows("SELECT key, value FROM metrics") == [("loss", 1.0)]
    assert rows("SELECT key, value FROM params") == [("lr", "0.1")]
    assert not is_uploaded(run, Meta.read(run))

    # Now the folder is there, but one file cannot be stored.
    blocked.unlink()
    (image,) = (run / "artifacts" / "images").glob("*.png")
    (root,) = (
        Path(uri.removeprefix("file://")) for (uri,) in rows("SELECT artifact_uri FROM runs")
    )
    in_the_way = root / "images" / image.name
    in_the_way.mkdir(parents=True)
    with pytest.raises(TrackingError, match="not everything is uploaded"):
        main([str(run)])
    assert (root / "config.yaml").exists()
    in_the_way.rmdir()
    assert main([str(run)]) == 0
    stored = {path.name for path in blocked.rglob("*.*")}
    assert {"config.yaml", "7.rank0.log", image.name} < stored
    assert is_uploaded(run, Meta.read(run))


def test_a_repeated_image_replaces_itself(tmp_path: Path) -> None:
    first = save_image(tmp_path, "a b", np.zeros((4, 5), np.uint8), 1)
    assert save_image(tmp_path, "a b", np.ones((4, 5, 1), bool), 1) == first
    assert save_image(tmp_path, "a b", np.full((4, 5, 4), 0.5), 2) != first
    from PIL import Image

    with Image.open(first[0]) as image:
        assert (image.size, image.mode, image.getpixel((0, 0))) == ((5, 4), "L", 255)


@pytest.mark.parametrize(
    ("key", "image", "message"),
    [
        ("a+b", np.zeros((2, 2)), "has letters, digits"),
        ("a", np.zeros((2, 2, 5)), r"the shape is \(2, 2, 5\)"),
        ("a", np.full((2, 2), 256), "in 0..255"),
    ],
)
def test_what_is_no_image_is_refused(tmp_path: Path, key: str, image: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_image(tmp_path, key, image, 1)
    assert list(tmp_path.rglob("*.png")) == []


def test_links_lead_to_the_training_runs(tmp_path: Path) -> None:
    server = "http://user@tracking:5000/"
    assert links.run_page("sqlite:////x/mlflow.db", "1", "ab") == (
        "http://127.0.0.1:5000/#/experiments/1/runs/ab?workflowType=machine_learning"
    )
    assert links.experiment_page("http://tracking:5000/", "1") == (
        "http://tracking:5000/#/experiments/1/runs?workflowType=machine_learning"
    )
    Meta(server, "exp", "n", "u").write(tmp_path)
    assert links.pages_of(tmp_path) == ()
    Uploaded(server, "u", "1", "ab", 7).write(tmp_path)
    pages = links.pages_of(tmp_path)
    assert pages[0].endswith("tracking:5000/#/experiments/1/runs/ab?workflowType=machine_learning")
    # A file of somebody else must not put its own words there, nor lead to a run of another store.
    Uploaded(server, "u", "1", "ab\x1b[1m", 7).write(tmp_path)
    assert links.pages_of(tmp_path) == ()
    Uploaded("http://other", "u", "1", "ab", 7).write(tmp_path)
    assert links.pages_of(tmp_path) == ()


def test_files_that_an_older_version_has_left_are_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "journal" / "uploaded.json"
    for noted, stored in (({"waiting": [7, 5]}, 5), ({}, 9), ({"waiting": [5], "files": 8}, 8)):
        Uploaded("http://h", "u", "1", "ab", 9).write(tmp_path)
        body = json.loads(file.read_text())
        file.write_text(json.dumps({**body, "files": None, **noted}))
        note = Uploaded.read(tmp_path)
        assert note is not None
        assert note.files_stored == stored


def test_a_change_on_a_node_is_told_once(tmp_path: Path) -> None:
    writer = samples.SampleWriter(samples.folder(tmp_path) / "n01.jsonl")
    seen = nodes.Nodes(tmp_path)
    writer.write(1.0, facts={"driver": "550"})
    assert seen.new_tags() == {"hpctrain.node.n01": "driver=550"}
    assert seen.new_tags() == {}
    writer.write(2.0, facts={"driver": "570"})
    assert seen.new_tags() == {"hpctrain.node.n01": "driver=570"}
    writer.close()
