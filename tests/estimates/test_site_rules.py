"""What a site polices: its rule file, and where its words are said before its mail comes."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.commands.select import all_runs
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.frozen import load
from hpctrain.errors import ConfigError
from hpctrain.insight.doctor import login
from hpctrain.insight.doctor.command import settings
from hpctrain.insight.estimates import right_size, site_rules
from hpctrain.insight.report.account.advice import notes
from tests.made_runs import make_run, status_json
from tests.report.accounts import BEGIN, account, attempt, write_run

RULES = {
    "idle_job": {"limit": 60, "says": "Jobs at 0% GPU for an hour are cancelled."},
    "idle_gpus": {"limit": 0.2, "says": "Leave no GPU in five idle."},
    "cores": {"limit": 4, "says": "You hold cores of others."},
    "memory": {"limit": 5, "says": "You hold memory of others."},
    "time_limit": {"limit": 10, "says": "Give an honest time limit."},
}
LAUNCH = {"gpus_per_node": 5, "cpus_per_task": 8, "mem_gb": 100, "time_min": 600, "warn_s": 120}


@pytest.fixture
def rules(tmp_path: Path) -> str:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(RULES, sort_keys=False))
    return str(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("idle: {limit: 1, says: x}", "idle: {'limit': 1, 'says': 'x'}: no such rule; there are"),
        ("cores: 4", "cores: 4: a rule is {limit: NUMBER, says: TEXT}"),
        ("cores: {limit: -1, says: x}", "limit must be a number above 0 (times the cores"),
        ("cores: {limit: true, says: x}", "limit must be a number above 0"),
        ("[cores]", "the file has no rules; there are idle_job, idle_gpus, cores"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_named_with_its_rule(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "rules.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        site_rules.read(str(file))
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    (finding,) = login._rules(str(file), 30)
    assert (finding.check, finding.result) == ("site.rules", "fail")


def test_doctor_says_the_rules_and_that_the_warning_must_come_before_the_mail(rules: str) -> None:
    config, _ = settings([f"site.rules={rules}", "monitor.idle_minutes=90"])
    (late,) = login._rules(config.site.rules, config.monitor.idle_minutes)
    assert late.result == "warn"
    assert late.cure.startswith("Set monitor.idle_minutes to less than 60")
    (good,) = login._rules(rules, 30)
    assert good.result == "pass"
    assert all(rule["says"] in good.found for rule in RULES.values())
    assert list(login._rules(None, 30)) == []


def sample(at: float, *use: float, cores: float = 10, gib: float = 10) -> dict[str, Any]:
    gpus = {f"gpu_{n}_utilization_percentage": value for n, value in enumerate(use)}
    host = {"cpu_utilization_percentage": cores, "system_memory_usage_megabytes": gib * 1073.741824}
    return {"time": BEGIN + at, "metrics": gpus | host}


def told(folder: Path, rules: str | None, *use: float, **host: float) -> list[str]:
    """Return the notes of the report on a finished run of an hour whose GPUs had this use."""
    run = write_run(
        folder,
        [attempt(0, 3600, launcher="slurm", job_id="1_0", step=10)],
        config={"launch": LAUNCH, "site": {"rules": rules}},
        sensors={"n1": [sample(at, *use, **host) for at in range(0, 3600, 60)]},
    )
    return notes(account(run))


def test_a_report_says_it_in_the_words_of_the_site(tmp_path: Path, rules: str) -> None:
    found = told(tmp_path / "a-00000001", rules, 90, 90, 90, 90, 0)
    assert "Leave no GPU in five idle. (idle_gpus: 0.2 part of the GPUs" in "; ".join(found)
    assert "You hold cores of others. (cores: 10 times the cores that were busy, limit 4)" in found
    assert any(each.startswith("You hold memory of others. (memory: 10 times") for each in found)
    assert any(each.startswith("Give an honest time limit. (time_limit: 10 ") for each in found)
    assert not any("0% GPU" in each for each in found)
    # And what to type, as without rules.
    assert "`launch.mem_gb=40`" in found[-1]
    assert found[-1] == told(tmp_path / "b-00000001", None, 90, 90, 90, 90, 0)[-1]

    whole = told(tmp_path / "c-00000001", rules, 0, 0)
    assert "Jobs at 0% GPU for an hour are cancelled. (idle_job: 60 minutes" in "; ".join(whole)
    good = told(tmp_path / "d-00000001", rules, 90, 90, cores=80, gib=60)
    assert not any(RULES[name]["says"] in "".join(good) for name in ("idle_gpus", "cores"))


def running(folder: Path, rules: str | None, told_ago: float, *use: float) -> Path:
    """Make a run that trains here, whose monitor has said that a GPU is idle."""
    now = time.time()
    mine = {"started": now - 9000, "host": os.uname().nodename, "pid": os.getpid()}
    run = make_run(folder, state="running", attempts=[mine])
    (run / "progress.json").write_text(json.dumps({"step": 5, "time": now, "stepped": now}))
    (run / "config.yaml").write_text(
        yaml.safe_dump({"site": {"rules": rules}, "monitor": {"idle_minutes": 30.0}})
    )
    (run / "monitor").mkdir()
    lines = [{"number": n, "time": now - 10 + n, **_use(use)} for n in range(5)]
    (run / "monitor" / "n1.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (run / "monitor" / "n1.idle").write_text("n1: gpu_1 below 5% for 30 minutes\n")
    os.utime(run / "monitor" / "n1.idle", (now - told_ago, now - told_ago))
    return run


def _use(values: tuple[float, ...]) -> dict[str, Any]:
    return {"metrics": {f"gpu_{n}_utilization_percentage": v for n, v in enumerate(values)}}


@pytest.mark.parametrize(
    ("use", "told_ago", "words"),
    [
        ((90, 0), 600, "1 of 2 GPUs idle for 40 minutes; Leave no GPU in five idle."),
        ((0, 0), 2400, "2 of 2 GPUs idle for 70 minutes; Jobs at 0% GPU for an hour"),
        ((0, 0), 600, "2 of 2 GPUs idle for 40 minutes; Leave no GPU in five idle."),
        ((90, 90), 600, ""),  # it works again
        ((90, 0), 9600, ""),  # an attempt before has said it
    ],
)
def test_status_says_it_while_the_run_runs(
    tmp_path: Path, rules: str, no_slurm: None, use: tuple[float, ...], told_ago: float, words: str
) -> None:
    running(tmp_path / "runs", rules, told_ago, *use)
    (row,) = status_json(tmp_path / "runs")
    assert row["state"] == "running"
    assert row["waste"].startswith(words)
    assert bool(row["waste"]) == bool(words)


def test_status_without_rules_says_what_is_idle(tmp_path: Path, no_slurm: None) -> None:
    running(tmp_path / "runs", None, 600, 90, 0)
    (row,) = status_json(tmp_path / "runs")
    assert row["waste"] == "1 of 2 GPUs idle for 40 minutes"


def test_what_a_job_did_not_need_is_recorded_at_its_end_and_said_by_status(
    tmp_path: Path, rules: str, no_slurm: None
) -> None:
    """`status` reads no samples for it."""
    run = running(tmp_path / "runs", rules, 600, 90, 0)
    values = {"launch": LAUNCH | {"time_min": 6000}, "site": {"rules": rules}}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert right_size.unused(run) == ""  # a script of one's own has asked Slurm for something else
    record = json.loads((run / "run.json").read_text())
    (attempt,) = record["attempts"]
    record["submission"] = {"script": str(tmp_path / "batch" / "script.sh")}
    (run / "run.json").write_text(json.dumps(record))
    told = right_size.unused(run)
    assert told.startswith("Leave no GPU in five idle. (idle_gpus: 0.5 part of")
    assert "Give an honest time limit. (time_limit: 40 times" in told
    assert "150 of 6000 minutes used: `launch.time_min=" in told
    (run / "config.yaml").write_text("launch: {time_min: 6000}")  # of before: without `rules`
    assert right_size.unused(run).startswith("150 of 6000 minutes used")
    requeued = [attempt | {"ended": attempt["started"] + 59 * 3600}, attempt | {"restart_count": 1}]
    (run / "run.json").write_text(json.dumps(record | {"attempts": requeued}))
    assert right_size.unused(run) == ""  # one of its jobs took longer than half the limit
    (run / "config.yaml").unlink()
    assert right_size.unused(run) == ""
    ended = make_run(tmp_path / "others", state="finished", attempts=[{"waste": told}])
    (row,) = status_json(ended.parent)
    assert row["waste"] == told


def test_status_stays_cheap(
    tmp_path: Path, no_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample is read of a run whose monitor has said nothing."""
    run = running(tmp_path / "runs", None, 600, 90, 0)
    (run / "monitor" / "n1.idle").unlink()
    monkeypatch.setattr("hpctrain.tracking.samples.read", None)
    (row,) = status_json(tmp_path / "runs")
    assert row["waste"] == ""


def test_a_submission_says_what_the_last_run_like_it_left_unused(
    reference: Callable[..., Path], composer: Composer
) -> None:
    right_size._shape_of.cache_clear()
    run = reference("train.log_every=5", "train.max_steps=44", "tracking.upload=false")
    own = load(run / "config.yaml")
    where = [f"output_dir={own.output_dir}", f"data.path={own.data.path}", "train.max_steps=44"]

    def said(*words: str) -> str:
        config = composer.typed(["experiment=digits", *where, *words])
        return "".join(right_size.of_sweep([config, config]))

    assert run in all_runs(run.parent)
    line = said("launch.time_min=600", "launch.mem_gb=512")
    assert line.startswith(f"{run.name}, the last run like this one: ")
    assert "of 512 GiB of memory used: `launch.mem_gb=" in line
    assert "0 of 600 minutes used: `launch.time_min=" in line
    assert "\n" not in line
    assert said("launch.time_min=3", "launch.mem_gb=null") == ""
    assert said("model.hidden=[8]", "launch.time_min=600") == ""  # no run was like it
