"""What `hpctrain gc` lists and deletes."""

import os
import time
from pathlib import Path

from hpctrain.commands import gc
from hpctrain.runs.run_dir import RunDir
from hpctrain.search.trials import SearchFile
from tests.conftest import run_module
from tests.made_runs import ATTEMPT, SAVED, SUBMITTED, make_checkpoint, make_run, old


def found(folder: Path) -> set[tuple[str, str]]:
    return {(item.kind, str(item.path.relative_to(folder))) for item in gc.find(folder)}


def test_what_can_be_deleted(tmp_path: Path, no_slurm: None) -> None:
    folder = tmp_path / "runs"
    done = make_run(folder, "digits-00000001", state="finished", code="a" * 16)
    for step in (10, 20, 30):
        make_checkpoint(done, step)
    make_checkpoint(done, 40, whole=False)
    judged = make_run(folder, "digits-00000006", state="finished", code="a" * 16)
    for step in (10, 20):
        make_checkpoint(judged, step)
    (judged / "evaluations" / "recorded").mkdir(parents=True)  # of 0.2.0: step 10 may be the best
    half = make_run(folder, "digits-00000002", state="interrupted", attempts=[SAVED], code="b" * 16)
    for step in (10, 20):
        make_checkpoint(half, step)
    old(half / ".config.yaml.node1.123")
    (half / ".run.json.node1.124").touch()  # changed just now
    (half / "checkpoints" / "step-00000030.tmp").mkdir()
    (half / "checkpoints" / "step-00000020.old").mkdir()
    (half / "checkpoints" / "step-00000025.old").mkdir()  # the only one of its step
    queue = make_run(folder, "digits-00000003", state="queued", submission=SUBMITTED, code="b" * 16)
    old(queue / ".config.yaml.node1.123")
    (queue / "checkpoints" / "step-00000030.tmp").mkdir()
    make_run(folder, "digits-00000001.1", state="finished", code="c" * 16)
    make_run(folder, "debug-00000004", state="finished", code="a" * 16)
    for snapshot in ("a" * 16, "b" * 16, "c" * 16, "unused"):
        old(folder / "code" / snapshot / "a.py")
    (folder / "code" / "new").mkdir()  # a submission may still be writing it
    outside = make_run(tmp_path / "elsewhere", state="finished")
    make_checkpoint(outside, 1)
    make_checkpoint(outside, 2)
    (folder / "link-00000005").symlink_to(outside)
    (folder / "code" / "link").symlink_to(outside)
    # The workers of a search wait in the queue, and no trial has begun.
    (search := folder / "sweeps" / "search").mkdir(parents=True)
    study = {"study": "s", "storage": str(tmp_path / "no.optuna"), "metric": "m"}
    SearchFile(**study, direction="minimize", n_trials=1, code="d" * 16).write(search)
    old(folder / "code" / ("d" * 16) / "a.py")

    for name, days in (("unused.tar", 31), ("code-used.tar", 29)):
        old(archive := folder / "environments" / name)
        os.utime(archive, (time.time() - days * 86400,) * 2)

    superfluous = {("checkpoint", f"{done.name}/checkpoints/step-000000{s}") for s in (10, 20)}
    safe = superfluous | {
        ("temporary", f"{half.name}/.config.yaml.node1.123"),
        ("temporary", f"{half.name}/checkpoints/step-00000020.old"),
        ("temporary", f"{half.name}/checkpoints/step-00000030.tmp"),
        ("code", "code/unused"),
        ("environment", "environments/unused.tar"),
    }
    assert found(folder) == safe

    before = sorted(folder.rglob("*"))
    shown = run_module("hpctrain", "gc", cwd=tmp_path).stdout
    assert "nothing was deleted: add --delete" in shown
    assert sorted(folder.rglob("*")) == before
    shown = run_module("hpctrain", "gc", "--delete", cwd=tmp_path).stdout
    assert "deleted: 7, " in shown
    assert found(folder) == set()
    assert sorted(path.name for path in (done / "checkpoints").iterdir()) == [
        "step-00000030",
        "step-00000040",
    ]
    assert sorted(path.name for path in (folder / "code").iterdir()) == [
        *("a" * 16, "b" * 16, "c" * 16, "d" * 16),
        "link",
        "new",
    ]
    assert sorted(path.name for path in (outside / "checkpoints").iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]
    assert (queue / ".config.yaml.node1.123").exists()
    assert not list(folder.rglob(".gc-*"))


def test_what_is_in_use_is_not_deleted(tmp_path: Path, no_slurm: None) -> None:
    run = make_run(tmp_path / "runs", state="finished", attempts=[ATTEMPT])
    make_checkpoint(run, 1)
    make_checkpoint(run, 2)
    with RunDir(run).lock():
        done = run_module("hpctrain", "gc", "--delete", cwd=tmp_path, code=6)
    assert "is in use by process" in done.stderr
    assert "1 of 1 could not be deleted" in done.stderr
    assert (run / "checkpoints" / "step-00000001").exists()
    # A folder that an earlier gc left half removed is deleted first.
    (run / "checkpoints" / ".gc-step-00000000").mkdir()
    done = run_module("hpctrain", "gc", "--delete", cwd=tmp_path)
    assert "deleted: 2, " in done.stdout
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
