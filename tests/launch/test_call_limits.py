"""How often the scheduler is called, and what happens at a site that takes four calls a minute.

The commands are stand-ins, and the time is a file that sleeping sets forward.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from submitit.core import core

import hpctrain
from hpctrain.cluster.slurm import partition_limit, patience, queue, sbatch, steps
from hpctrain.commands import logs, status
from hpctrain.launch import logged_jobs
from hpctrain.launch.sweeps import wait
from tests.conftest import ROOT, runs

REFUSED = "Submission rate limit exceeded: 4 calls per minute"
COMMANDS = ("sbatch", "scontrol", "squeue", "sacct", "sinfo")


class Site:
    """A scheduler that takes `limit` calls a minute, in a time of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.end = folder, float("inf")
        (folder / "clock").write_text("1000")
        for name in ("taken", "refused"):
            (folder / name).touch()
        self.limit(4)
        (folder / "bin").mkdir()
        for name in COMMANDS:
            shutil.copy(ROOT / "tests" / "limited_slurm.sh", folder / "bin" / name)

    def limit(self, calls: int) -> None:
        (self.folder / "limit").write_text(str(calls))

    def monotonic(self) -> float:
        return float((self.folder / "clock").read_text())

    time = monotonic

    def sleep(self, seconds: float) -> None:
        now = self.monotonic() + seconds
        (self.folder / "clock").write_text(f"{now:.1f}")
        if now >= self.end:
            raise KeyboardInterrupt

    def strftime(self, form: str) -> str:
        return form

    def calls(self, file: str = "taken") -> list[str]:
        return [line.split()[1] for line in (self.folder / file).read_text().splitlines()]

    def forget(self) -> None:
        (self.folder / "taken").write_text("")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for module in (patience, queue, wait, status, logs, logged_jobs):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(core, "_time", made)
    monkeypatch.setattr(logs, "_READ_S", 5.0)
    monkeypatch.setattr(logged_jobs.SlurmLoggedJob, "watcher", logged_jobs._QueueWatcher())
    answers = (
        sbatch.max_array_size,
        partition_limit.cluster_config,
        partition_limit.partition_lines,
    )
    for answer in answers:
        answer.cache_clear()
    yield made
    for answer in answers:
        answer.cache_clear()


@pytest.fixture
def submit(digits: Path, tmp_path: Path) -> Callable[..., list[Any]]:
    where = ("experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs")
    return lambda *words: hpctrain.submit(*where, "tracking=off", *words)


def test_a_sweep_waits_until_the_site_takes_its_calls(
    site: Site, submit: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    jobs = submit("seed=range(0,30)")
    assert {job.job_id for job in jobs} == {f"7_{task}" for task in range(30)}
    assert site.calls().count("sbatch") == 2  # --test-only, and one array
    assert len(site.calls()) < 10
    assert "sbatch" in site.calls("refused")
    assert f"sbatch: sbatch: error: {REFUSED}: asking again in 2 s" in caplog.text
    begin, end = 1000, site.monotonic()
    assert end - begin >= 60  # until the first call is a minute old


def test_a_site_that_never_takes_a_call_is_an_error(
    site: Site, submit: Callable[..., list[Any]]
) -> None:
    site.limit(0)
    with pytest.raises(hpctrain.errors.LaunchError, match="controller does not answer"):
        submit("seed=1")
    assert site.monotonic() - 1000 >= sum(patience.REFUSED_S)


def test_watchers_ask_less_than_once_in_30_s(
    site: Site, submit: Callable[..., list[Any]], tmp_path: Path
) -> None:
    jobs, minutes = submit("seed=range(0,4)"), 10
    name = runs(tmp_path / "runs")[0].name

    def handles() -> None:
        for _ in itertools.count():
            [job.done() for job in jobs]
            site.sleep(5)

    watchers: dict[str, Callable[[], object]] = {
        "status": lambda: status.main(["--dir", f"{tmp_path}/runs", "--watch", "5"]),
        "logs": lambda: logs.main([name, "--dir", f"{tmp_path}/runs", "-f"]),
        "wait": lambda: submit("seed=range(0,4)", "launch.wait=true"),
        "jobs": handles,
    }
    for what, watch in watchers.items():
        site.sleep(100)  # the calls before are more than a minute old
        site.forget()
        site.end = site.monotonic() + minutes * 60
        with contextlib.suppress(KeyboardInterrupt):
            watch()
        site.end = float("inf")
        assert 2 <= len(site.calls()) <= 2 * minutes, (what, site.calls())
        assert "squeue" not in site.calls("refused"), what


def test_waiting_ends_when_the_runs_say_so(
    site: Site, submit: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run directories say needs no call: the queue is asked once more, and at once."""
    submit("seed=range(0,3)")
    site.limit(100)
    sleep, begun = site.sleep, site.monotonic()

    def finish(seconds: float) -> None:
        sleep(seconds)
        if site.monotonic() - begun > 8:
            (tmp_path / "empty").touch()
            for run in runs(tmp_path / "runs"):
                hpctrain.runs.run_dir.RunDir(run).update(state="finished")

    monkeypatch.setattr(site, "sleep", finish)
    site.forget()
    submit("seed=range(0,3)", "launch.wait=true")
    assert site.monotonic() - begun < 20
    assert site.calls().count("squeue") == 3  # the submission, the begin and the end of waiting


def test_a_batch_script_repeats_a_requeue_that_was_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    programs = {
        "squeue": "echo RUNNING",
        "scontrol": f"echo $* >>{tmp_path}/asked; [[ $1 != requeue ]] || "
        f"(($(grep -c ^requeue {tmp_path}/asked) > 2))",
        "sleep": f"echo $1 >>{tmp_path}/slept",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    text = f"job=7_1 nodes=1 run={tmp_path}/run\n{steps.TEXT}\nrequeue"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", text], env=env, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked.count("requeue 7_1") == 3
    assert (tmp_path / "slept").read_text().split() == ["1", "2"]


@pytest.mark.parametrize(
    ("command", "said", "repeated"),
    [
        ("sbatch", "error: too many submissions: 1 per second", True),
        ("squeue", "slurm_load_jobs error: Socket timed out on send/recv operation", True),
        ("scontrol show node", "error: Socket timed out on send/recv operation", True),
        # The job may be there: sbatch itself looks for it before it asks again.
        ("sbatch", "error: Socket timed out on send/recv operation", False),
        ("scontrol requeue 1", "error: Socket timed out on send/recv operation", False),
        ("sbatch", "Job violates accounting/QOS policy (job submit limit, user's size)", False),
        ("sbatch", "AssocGrpCPURunMinutesLimit", False),
        ("squeue", "Unable to contact slurm controller (connect failure)", False),
    ],
)
def test_which_failures_are_repeated(command: str, said: str, repeated: bool) -> None:
    assert bool(patience.pauses(tuple(command.split()), said)) == repeated
