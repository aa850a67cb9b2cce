"""Run directories of strangers, and damaged ones: commands touch nothing else, and go on."""

import fcntl
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain import cli
from hpctrain.commands import cancel, gc, state, status
from hpctrain.commands import logs as logs_module
from hpctrain.commands import status as status_module
from hpctrain.commands.facts import Facts
from hpctrain.errors import StorageError
from hpctrain.insight.report import report_command
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.tracking.meta import Meta, Uploaded
from tests.conftest import process_kept, run_json, run_module, runs
from tests.made_runs import NOW, make_checkpoint, make_run

OTHER = 65534  # user id
BEGUN = {"started": NOW, "launcher": "single", "host": socket.gethostname()}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def hold(path: Path) -> int:
    """Hold the lock of a run in this process."""
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@as_root
def test_cancel_leaves_the_runs_of_others_and_goes_on(
    tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = BEGUN | {"pid": os.getpid()}
    theirs = make_run(tmp_path, "digits-00000001", state="running", attempts=[attempt])
    os.chown(theirs / "run.json", OTHER, OTHER)
    full = make_run(tmp_path, "digits-00000002", state="running", attempts=[attempt])
    (full / "stop").mkdir()
    (full / "stop" / "x").touch()  # also root cannot write the request
    own = make_run(tmp_path, "digits-00000003", state="running", attempts=[attempt])
    locks = [hold(run) for run in (theirs, full, own)]
    assert cancel.main(["--dir", str(tmp_path), "--all"]) == 0
    said = capsys.readouterr().out
    assert "skipped: it is the run of another user" in said
    assert f"skipped: {full} cannot be written (Is a directory)" in said
    assert stop_request.read(own) is not None
    assert f"{own.name}: asked to save and stop, on {socket.gethostname()}" in said
    assert not (theirs / "stop").exists()
    for lock in locks:
        os.close(lock)


@pytest.mark.parametrize("job_id", ["--state=RUNNING", "7_0 8", "7_0\n8", "7_*", "7,8", "-1"])
def test_only_a_job_id_reaches_scancel(job_id: str, tmp_path: Path, no_slurm: None) -> None:
    attempts = [BEGUN | {"launcher": "slurm", "job_id": job_id}]
    run = make_run(tmp_path, state="running", attempts=attempts)
    assert Facts.read(run).damage.startswith(f"{run}/run.json is damaged: $.attempts[0].job_id is ")
    submitted = {"script": f"{tmp_path}/array-0/job.sh", "task": 0, "user": "me", "time": NOW}
    queued = make_run(tmp_path, "digits-00000002", state="queued", submission=submitted)
    (tmp_path / "array-0").mkdir()
    (tmp_path / "array-0" / "job_id").write_text(job_id)
    assert Facts.read(queued).job_id == ""


@pytest.mark.parametrize("listed", ["", "/elsewhere/digits-00000009\n"])
def test_a_job_of_another_run_is_not_cancelled(listed: str, tmp_path: Path, no_slurm: None) -> None:
    script = tmp_path / "array-0" / "job.sh"
    script.parent.mkdir()
    submitted = {"script": str(script), "task": 0, "user": "me", "time": NOW}
    run = make_run(tmp_path, state="queued", submission=submitted)
    facts = Facts.read(run)
    facts.job = cancel.queue.Job("7_0", "PENDING", "None", "", "N/A")
    (script.parent / "tasks").write_text(listed)
    action, message = cancel._action(facts, state.State("queued"), set(), save=False)
    assert (action, "not of this run" in message) == ("skip", True)
    (script.parent / "tasks").write_text(f"{run}\n")
    assert cancel._action(facts, state.State("queued"), set(), save=False)[0] == "cancel"


def test_gc_and_training_follow_no_link_of_a_lock(
    tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("ten years of work")
    folder = tmp_path / "runs"
    run = make_run(folder, state="finished")
    for step in (10, 20):
        make_checkpoint(run, step)
    (run / "lock").symlink_to(thesis)
    (run / ".run.json.lock").symlink_to(thesis)
    with pytest.raises(StorageError, match="could not be deleted"):
        gc.main(["--dir", str(folder), "--delete"])
    assert "it is a link, or lies behind one" in capsys.readouterr().err
    for change in (RunDir(run).lock, lambda: RunDir(run)._change()):
        with pytest.raises(OSError, match="it is a link"), change():
            pass
    assert (thesis.read_text(), thesis.stat().st_mode & 0o777) == ("ten years of work", 0o644)


DAMAGE: list[Any] = [
    "[" * 100_000,
    {"state": "failed", "attempts": 5},
    {"state": "finished", "result": {"step": 1e30}},
    {"state": "running", "attempts": [{"started": float("nan")}]},
    {"state": "finished", "code": "../../home/me"},
    {"state": "failed", "attempts": [{"started": NOW, "error": "a\0b"}]},
    {"state": "queued", "submission": {"script": "x", "task": 0, "user": "--all", "time": 0.0}},
]


@pytest.mark.parametrize("content", DAMAGE, ids=lambda content: str(content)[:60])
def test_a_damaged_run_is_shown_and_the_others_too(
    content: Any, tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_run(tmp_path, "digits-00000002", state="finished", signature="2")
    bad = make_run(tmp_path, "digits-00000001", **(content if isinstance(content, dict) else {}))
    if isinstance(content, str):
        (bad / "run.json").write_text(content)
    for run in (good, bad):
        for step in (10, 20):
            make_checkpoint(run, step)
    where = ["--dir", str(tmp_path)]
    assert status.main(where) == 0
    assert bad.name in capsys.readouterr().out
    assert status.main([*where, "--json"]) == 0
    rows = {Path(row["run"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert [rows[run.name]["state"] for run in (good, bad)] == ["finished", "damaged"]
    assert f"{bad}/run.json is damaged: " in rows[bad.name]["reason"]
    assert gc.main(where) == 0
    (item, _) = capsys.readouterr().out.splitlines()
    assert f"/{good.name}/checkpoints/" in item
    assert cancel.main([*where, "--all"]) == 0
    assert report_command.main([*where, "--json", str(bad), str(good)]) == 0
    assert good.name in capsys.readouterr().out


DAMAGED_CONFIGS = {
    "": "config.yaml: data.path is missing",
    "[]": "cannot be read as a frozen config (it has no keys)",
    "launch: [": "line 2: it is not YAML (while parsing a flow node",
    "garbage: 1": "config.yaml: unknown key garbage",
}


@pytest.mark.parametrize("content", DAMAGED_CONFIGS)
def test_a_damaged_config_is_named_in_one_line(
    tmp_path: Path,
    no_slurm: None,
    content: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {"signature": "00000001", "data_digest": "x", "state": "interrupted"}
    run = make_run(tmp_path, **facts)
    (run / "config.yaml").write_text(content)

    def resume() -> tuple[int, str]:
        """Return the exit code and the stderr of `hpctrain resume`, called in this process."""
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["hpctrain", "resume", "--dir", str(tmp_path)])
        with process_kept(), pytest.raises(SystemExit) as end:
            cli.main()
        return int(str(end.value.code)), capsys.readouterr().err

    told = [resume()]
    if content == "[]":  # the ranks say it in the same way
        told.append((2, run_module("hpctrain", "run", str(run), code=2).stderr))
    for code, said in told:
        assert code == 2
        assert f"error: {run}/config.yaml: " in said
        assert DAMAGED_CONFIGS[content] in said
        assert said.count("\n") == 1
    (run / "config.yaml").unlink()
    missing = "config.yaml is missing; the command that has made the run writes it"
    assert resume() == (6, f"error: {run}: no run directory ({missing})\n")


def test_a_fifo_is_not_waited_for(
    tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_run(tmp_path, "digits-00000001", state="finished")
    run = make_run(tmp_path, "digits-00000002")
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    began = {"started": 1.0, "launcher": "slurm", "job_id": "7_0"}
    other = make_run(tmp_path, "digits-00000003", state="running", attempts=[began])
    submitted = {"script": f"{tmp_path}/array/job.sh", "task": 0, "user": "me", "time": 1.0}
    queued = make_run(tmp_path, "digits-00000004", state="queued", submission=submitted)
    ended = make_run(tmp_path, "digits-00000005", state="finished")
    (tmp_path / "array" / "batch").mkdir(parents=True)
    for folder in (other, ended):
        (folder / "journal").mkdir()
        for name in ("meta.json", "uploaded.json", "upload.lock", "events.jsonl"):
            os.mkfifo(folder / "journal" / name)
    Meta("sqlite:////x", "exp", "name", "uid").write(good)
    Uploaded("sqlite:////x", "uid", "1", "2", 0).write(good)
    os.mkfifo(good / "journal" / "events.jsonl")
    for fifo in (
        *(other / name for name in ("progress.json", "stop", "lock", "logs/7_0.rank0.log")),
        *(tmp_path / "array" / name for name in ("job_id", "batch/.log", "batch/7_0.log")),
    ):
        os.mkfifo(fifo)
    folder, loop = (make_run(tmp_path, f"digits-0000000{number}") for number in (6, 7))
    for path in (folder, loop):
        (path / "run.json").unlink()
    (folder / "run.json").mkdir()
    (loop / "run.json").symlink_to("run.json")
    wrong = (run, folder, loop)
    for words in (["--dir", str(tmp_path)], [str(tmp_path)], [*map(str, (*wrong, good))]):
        assert status_module.main([*words, "--json"]) == 0
        rows = {row["run"]: row["state"] for row in json.loads(capsys.readouterr().out)}
        assert rows[str(good)] == "finished"
        assert {rows[str(path)] for path in wrong} == {"damaged"}
        more = () if str(good) in words else (other, queued, ended)
        assert set(rows) == {str(path) for path in (good, *wrong, *more)}
    for path, more in ((other, []), (other, ["-f"]), (queued, [])):
        with pytest.raises(StorageError, match="no log yet"):
            logs_module.main([path.name, "--dir", str(tmp_path), *more])
    # A log that becomes a FIFO at the last moment is an error, too.
    with pytest.raises(OSError, match="not a regular file"):
        logs_module._print_end(other / "logs" / "7_0.rank0.log", 30)


@pytest.mark.slow
def test_looking_at_a_run_runs_no_code_that_its_config_names(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
        "def net(**_): raise SystemExit(3)\n"
    )
    run_module(
        *("hpctrain", "freeze", "experiment=digits", f"data.path={digits}"),
        *(f"output_dir={tmp_path}/runs", "model._target_=evil.net", "tracking=off"),
        cwd=tmp_path,
    )
    (run,) = runs(tmp_path / "runs")
    where = ("--dir", str(tmp_path / "runs"))
    record = run_json(run) | {"state": "failed", "attempts": [{"error": "x", "started": 1.0}]}
    (run / "run.json").write_text(json.dumps(record))
    (run / "logs").mkdir()
    (run / "logs" / "terminal_1.rank0.log").write_text("x\n")
    for command in (["status"], ["logs", run.name], ["gc"]):
        run_module("hpctrain", *command, *where, cwd=tmp_path)
    run_module("hpctrain", "cancel", run.name, *where, cwd=tmp_path)
    run_module("hpctrain", "status", "--upload", str(run), code=7, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    run_module("hpctrain", "run", str(run), code=3, cwd=tmp_path)
    assert (tmp_path / "ran").exists()
