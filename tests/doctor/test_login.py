"""Tests of `doctor` on a login node."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from hpctrain.base.files.record import convert
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, DataConfig
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.insight.doctor import command, login
from hpctrain.insight.doctor.checks import file_systems
from hpctrain.insight.doctor.command import main, settings
from hpctrain.insight.doctor.finding import Finding
from hpctrain.insight.doctor.probe import Expectation
from hpctrain.launch.functions.function_call import Call


def verdicts(findings: Iterator[Finding] | list[Finding]) -> dict[str, str]:
    return {each.check: each.result for each in findings}


def test_what_slurm_would_do_with_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, _ = settings([f"output_dir={tmp_path}", "launch.time_min=180"])

    def found(beyond: str, start: str) -> list[str]:
        monkeypatch.setattr(login, "beyond_partition", lambda launch, partition: beyond)
        monkeypatch.setattr(login.sbatch, "expected_start", lambda script, job: start)
        limit = next(login._partition(config.launch, config.site))
        return [each.result for each in (limit, login._job(JobRequest.of(config)))]

    assert found("", "to start at 2026-01-01T00:00:00 on nodes n1") == ["pass", "pass"]
    assert found("the partition allows 120 minutes", "not now, it will wait") == ["fail", "warn"]


def test_a_full_disk(tmp_path: Path) -> None:
    """A real file system of 1 MB, which cannot take the probe."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        found = verdicts(file_systems.checked("output_dir", tmp_path / "runs"))
        left = list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert found["output_dir: free space"] == "fail"
    assert found["output_dir: writing"] == "fail"
    assert left == []


def test_the_mlflow_store(tmp_path: Path) -> None:
    config, _ = settings([f"output_dir={tmp_path}"])
    assert login.mlflow_store(config.tracking).result == "pass"
    (tmp_path / "mlflow.db").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)
    assert login.mlflow_store(config.tracking).result == "fail"
    config.tracking.uri = "http://127.0.0.1:9"
    assert login.mlflow_store(config.tracking).result == "warn"  # metrics wait in the journal
    config.tracking.uri = "file:///tmp/mlruns"
    assert login.mlflow_store(config.tracking).result == "fail"


def test_the_command(
    tmp_path: Path,
    digits: Path,
    no_sbatch: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", no_sbatch["PATH"])
    where = [f"output_dir={tmp_path}/runs", f"data.path={digits}"]
    assert main(["--json", *where]) == 0
    (place,) = json.loads(capsys.readouterr().out)["places"].values()
    found = {each["check"]: each["verdict"] for each in place["findings"]}
    assert found["data.path"] == "pass"
    assert found["Slurm"] == "unknown"
    assert "fail" not in found.values()
    assert not (tmp_path / "runs").exists()
    assert main([*where[:1], f"data.path={tmp_path}/nothing"]) == 9
    shown = capsys.readouterr().out
    assert "No such file" in shown
    assert "fail: data.path: Correct data.path=" in shown


def test_nodes_are_asked_without_secrets_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transform may have the token of a service; a call that has one is refused."""
    asked: list[Call] = []

    def submit(config: Config, calls: list[Call], here: bool) -> NoReturn:
        asked.extend(calls)
        raise LaunchError("no cluster")

    monkeypatch.setattr(command.function, "submit", submit)
    monkeypatch.setenv("SERVICE_TOKEN", "abc123def456")
    transform = "data.batch_transforms=[{_target_: own.Cut, key: '${oc.env:SERVICE_TOKEN}'}]"
    with pytest.raises(LaunchError, match="no cluster"):
        main(["--nodes", "2", f"output_dir={tmp_path}", "data.path=/data/set", transform])
    (call,) = asked
    assert convert(Expectation, call.args[0], "asked").data == DataConfig(path="/data/set")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nodes=3"], r"launch\.nodes"),
        (["seed=1,2"], "2 runs"),
        (["launch.nodes=0"], "at least 1"),
        (["digits"], "KEY=VALUE"),
        (["--nodes", "0"], "at least 1"),
        (["--nodes", "2", "launch.nodes=3"], "give one of them"),
    ],
)
def test_wrong_arguments(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        main(argv)
    assert list(tmp_path.iterdir()) == []
