"""The account of one run: parts of time, energy, cost, notes, and what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.insight.report.account import run_account
from hpctrain.insight.report.account.advice import notes
from hpctrain.insight.report.account.time_parts import Allocation
from hpctrain.insight.report.run_tree import tree
from hpctrain.insight.report.tree import as_json
from hpctrain.runs.run_dir import RunDir
from tests.report.accounts import BEGIN, account, attempt, metrics, spent, write_run


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """A run that was killed at step 30 after 42 s, and resumed from step 20 at 50 s."""
    return write_run(
        tmp_path / "runs" / "digits-1",
        [attempt(2), attempt(52, 75, first_step=20)],
        [
            spent(1, 20, 10, startup=10, compute=8, data_wait=2),
            metrics(1, 20, 10, train_loss=1.0, val_accuracy=0.5),
            spent(1, 32, 20, startup=10, compute=16, data_wait=4, checkpoint=2),
            metrics(1, 32, 20, train_loss=0.5, val_accuracy=0.6),
            spent(1, 40, 28, startup=10, compute=22, data_wait=6, checkpoint=2),
            metrics(1, 42, 30, train_loss=0.1, val_accuracy=0.99),
            {"kind": "superseded", "attempt": 2, "time": BEGIN + 56, "from": 4},
            spent(2, 70, 40, startup=5, compute=12, evaluation=3),
            metrics(2, 70, 40, train_loss=0.4, val_accuracy=0.7),
        ],
        result={"step": 40},
    )


def test_parts_add_up_and_repeated_steps_are_lost(resumed: Path) -> None:
    found = account(resumed)
    time = found.time
    # 0 to 42 s (the last sign of life), and 50 to 75 s.
    assert time.pop("allocated") == pytest.approx(42 + 25)
    assert sum(time.values()) == pytest.approx(67)
    assert time["startup"] == 10
    assert time["restart"] == 5
    assert (time["compute"], time["data_wait"]) == (16 + 12, 4)
    assert time["lost"] == 8 + 2  # what followed step 20, and what no record of the attempt has
    assert (time["evaluation"], time["shutdown"]) == (3, 5)
    assert found.goodput == pytest.approx(28 / 67)
    assert found.history.series("train/loss").values.tolist() == [1.0, 0.5, 0.4]


def test_between_two_records_steps_share_the_time(resumed: Path) -> None:
    record = json.loads((resumed / "run.json").read_text())
    record["attempts"][1]["first_step"] = 24  # half of the steps from 20 to 28 count
    (resumed / "run.json").write_text(json.dumps(record))
    assert account(resumed).time["lost"] == 4 + 2


def test_a_rollback_loses_the_steps_before_it(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        [attempt(0, 50)],
        [
            spent(1, 10, 10, startup=5, compute=5),
            metrics(1, 10, 10, train_loss=1.0),
            spent(1, 30, 30, startup=5, compute=25),
            metrics(1, 30, 30, train_loss=float("nan")),
            {"kind": "superseded", "attempt": 1, "time": BEGIN + 31, "from": 2},
            spent(1, 50, 28, startup=5, compute=45),
        ],
    )
    time = account(run).time
    assert (time["compute"], time["lost"], time["allocated"]) == (5 + 20, 20, 50)
    # A later attempt goes on from step 20: of the steps since the rollback 8 of 18 are lost, too.
    record = json.loads((run / "run.json").read_text())
    record["attempts"].append(attempt(51, 52, first_step=20))
    (run / "run.json").write_text(json.dumps(record))
    time = account(run).time
    assert (time["compute"], time["lost"]) == pytest.approx((5 + 20 * 10 / 18, 20 + 20 * 8 / 18))


def test_an_attempt_without_a_step_is_lost_if_the_next_one_begins_before_it(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        [attempt(0, 10), attempt(10, 20, first_step=10), attempt(20, 30, first_step=5)],
        [
            spent(1, 9, 10, startup=5, compute=4),
            spent(2, 19, 10, startup=5, evaluation=4),
            spent(3, 29, 15, startup=5, compute=4),
        ],
    )
    time = account(run).time
    assert (time["compute"], time["evaluation"], time["lost"]) == (2 + 4, 0, 2 + 4)


def test_slurm_adds_the_queue_and_the_time_around_the_program(
    resumed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads((resumed / "run.json").read_text())
    for each in record["attempts"]:
        each |= {"launcher": "slurm", "job_id": "7_1"}
    (resumed / "run.json").write_text(json.dumps(record))
    booked = [
        Allocation(BEGIN - 90, BEGIN - 30, BEGIN - 20, "NODE_FAIL"),  # nothing has begun
        Allocation(BEGIN - 20, BEGIN - 4, BEGIN + 46, "REQUEUED"),
        Allocation(BEGIN + 46, BEGIN + 48, BEGIN + 77, "COMPLETED"),
    ]
    monkeypatch.setattr(run_account, "allocations", lambda jobs: {"7_1": booked})
    found = account(resumed)
    assert found.queue_s == 60 + 16 + 2
    time = found.time
    assert time["allocated"] == pytest.approx(10 + 50 + 29)
    assert (time["idle"], time["startup"], time["restart"]) == (10, 14, 7)
    assert (time["lost"], time["shutdown"]) == (14, 7)
    assert "10 s of allocations in which the program did not begin" in notes(found)[0]
    # A worker of a search has trained other trials before it, between its attempts, and after it.
    RunDir(resumed).update(submission={"script": "/s/workers/array-0/job.sh", "user": "me"})
    assert account(resumed).time["allocated"] == pytest.approx(42 + 25)
    RunDir(resumed).update(submission=None)
    # In one job, a person or the batch script has started the second attempt.
    whole = Allocation(BEGIN - 20, BEGIN - 4, BEGIN + 77, "COMPLETED")
    monkeypatch.setattr(run_account, "allocations", lambda jobs: {"7_1": [whole]})
    for state, expected in {"failed": (8, 5), "interrupted": (0, 13)}.items():
        record["attempts"][0] |= {"state": state}
        (resumed / "run.json").write_text(json.dumps(record))
        time = account(resumed).time
        assert (time["idle"], time["restart"]) == expected
    # A run that shares its job does not pay for the others.
    long = Allocation(BEGIN - 20, BEGIN - 4, BEGIN + 7000, "COMPLETED")
    monkeypatch.setattr(run_account, "allocations", lambda jobs: {"7_1": [booked[0], long]})
    record["submission"] = {"script": "/job.sh", "task": 1, "pack": 4}
    (resumed / "run.json").write_text(json.dumps(record))
    time = account(resumed).time
    assert (time["idle"], time["shutdown"]) == (0, 5)


def test_without_records_of_time_nothing_is_guessed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [attempt(0, 100)], [metrics(1, 50, 10, train_loss=1.0)])
    found = account(run)
    assert (found.time["unknown"], found.time["allocated"], found.goodput) == (100, 100, None)
    assert any(text.startswith("time of attempt 1 by part") for text in found.left_out)


def test_a_run_in_progress_is_shown_as_of_now(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", [attempt(0)], [spent(1, 60, 10, startup=10, compute=50)], state="running"
    )
    (run / "progress.json").write_text(
        json.dumps({"time": BEGIN + 99, "step": 19, "stepped": BEGIN + 98, "max_steps": 30})
    )
    with RunDir(run).lock():
        found = account(run, now=100)
    assert (found.time["allocated"], found.time["unknown"]) == (100, 40)
    assert notes(found)[0].startswith("the run is in progress: this is how it stands at step 19")


def test_a_damaged_journal_is_read_as_far_as_it_goes(resumed: Path) -> None:
    journal = resumed / "journal" / "events.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[0] = b"\xff" * (len(lines[0]) - 1) + b"\n"
    journal.write_bytes(b"".join(lines) + b'{"kind":"metrics","attempt":2,"time":18')
    found = account(resumed)
    assert found.history.series("train/loss").values.tolist() == [1.0, 0.5, 0.4]
    assert "2 damaged places in the journal" in found.left_out
    assert found.time["allocated"] == pytest.approx(67)


def gpu_run(folder: Path, **config: Any) -> Path:
    """Write a run of 2 GPUs for an hour; the sensors are written by hand, as there is no GPU."""
    samples: list[dict[str, Any]] = [
        {"time": BEGIN, "facts": {f"gpu_{n}": "NVIDIA H100 80GB HBM3" for n in (0, 1)}}
    ]
    for minute in range(61):
        values = {}
        for n in (0, 1):
            values |= {
                f"gpu_{n}_utilization_percentage": 90.0 if n == 0 else 0.0,
                f"gpu_{n}_memory_usage_percentage": 22.0,
                f"gpu_{n}_memory_usage_megabytes": 18_000.0,
            }
        values |= {f"gpu_{n}_energy_joules": 30_000.0 * minute for n in (0, 1)}
        samples.append({"time": BEGIN + 60 * minute, "metrics": values})
    return write_run(
        folder,
        [attempt(0, 3600, world_size=2)],
        [spent(1, 3600, 1000, startup=60, compute=3540)],
        config={"train": {"global_batch_size": 512}, **config},
        sensors={"n1": samples},
    )


def test_energy_cost_and_notes_of_gpus(tmp_path: Path) -> None:
    shown = as_json(tree(account(gpu_run(tmp_path / "run"))))
    assert shown["gpu_hours"] == 2
    assert shown["cost"] == 2 * 3.0
    assert shown["currency"] == "USD"
    assert shown["kwh"] == pytest.approx(2 * 1.8e6 / 3.6e6)
    assert shown["idle_gpu_hours"] == pytest.approx(61 / 60)
    assert shown["notes"][0].startswith("GPU memory 22% used: `train.global_batch_size=1024` has ")
    assert shown["notes"][0].endswith("; or a quarter of the GPUs")
    assert any("GPU-hours were idle: `monitor.idle_action=stop`" in each for each in shown["notes"])


@pytest.mark.parametrize(
    ("parts", "config", "note"),
    [
        ({"data_wait": 300}, {"data": {"threads": 2}}, "`data.threads=4`"),
        (
            {"data_wait": 300},
            {"data": {"transforms": [{"_target_": "a.b"}]}, "launch": {"cpus_per_task": 3}},
            "data: `data.workers=3` lets processes apply `data.transforms`",
        ),
        ({"checkpoint": 100}, {"checkpoint": {"every_steps": 50}}, "`checkpoint.every_steps=250`"),
        (  # not both more often and less often
            {"checkpoint": 130, "lost": 120},
            {"checkpoint": {"every_steps": None, "every_s": 60.0}},
            "went into checkpoints: `checkpoint.every_s=420`",
        ),
        ({"evaluation": 400}, {"train": {"eval_every": 10}}, "`train.eval_every=20`"),
    ],
)
def test_each_note_names_the_override(
    tmp_path: Path, parts: dict[str, float], config: dict[str, Any], note: str
) -> None:
    rest = 1000 - sum(parts.values())
    events = [spent(1, 1000, 10, compute=rest, **parts)]
    run = write_run(tmp_path / "run", [attempt(0, 1000)], events, config=config)
    (text,) = notes(account(run))
    assert note in text


def test_waits_for_a_slow_rank_are_lost_and_no_larger_batch_is_advised(tmp_path: Path) -> None:
    parts = {"compute": 100, "communication": 300, "slow_rank": 600}
    text = "rank 1 (n2) is slow: its own part of the steps took 14 times as long"
    note = {"topic": "slow_rank", "text": text, "step": 5, "about": "1"}
    events = [spent(1, 1000, 10, **parts)]
    found = account(write_run(tmp_path / "run", [attempt(0, 1000)], events, notes=[note]))
    assert (found.goodput, found.time["slow_rank"]) == (pytest.approx(0.4), 600)
    (said,) = notes(found)
    assert said.startswith(text)


@pytest.mark.parametrize(
    ("seconds", "launch", "load", "said"),
    [
        (
            1200,
            {"mem_gb": 64, "cpus_per_task": 16, "time_min": 600},
            20.0,
            "3.7 GiB of 64 GiB of memory used: `launch.mem_gb=5`; 20% of the cores used: "
            "`launch.cpus_per_task=4`; 20 of 600 minutes used: `launch.time_min=26`",
        ),
        (  # what a GPU needs stays, and the time to save
            60,
            {"mem_gb": 64, "cpus_per_task": 16, "time_min": 60, "warn_s": 120}
            | {"gpus_per_node": 4, "tasks_per_node": 4},
            5.0,
            "`launch.mem_gb=32`; 5% of the cores used: `launch.cpus_per_task=2`; 1 of 60 minutes "
            "used: `launch.time_min=5`",
        ),
    ],
)
def test_what_a_job_asked_for_and_did_not_need(
    tmp_path: Path, seconds: int, launch: dict[str, int], load: float, said: str
) -> None:
    values = {"cpu_utilization_percentage": load, "system_memory_usage_megabytes": 4_000.0}
    run = write_run(
        tmp_path / "run",
        [attempt(0, seconds, launcher="slurm")],
        [spent(1, seconds, 10, compute=seconds)],
        config={"launch": launch},
        sensors={"n1": [{"time": BEGIN, "metrics": values}]},
    )
    (note,) = notes(account(run))
    assert said in note


def test_the_step_of_a_killed_run_is_the_last_one_that_was_heard_of(tmp_path: Path) -> None:
    lost = write_run(
        tmp_path / "run", [attempt(0)], [spent(1, 20, 10, compute=20)], state="running"
    )
    (lost / "progress.json").write_text(json.dumps({"step": 12, "time": BEGIN + 24}))
    assert account(lost).step == 12
    (lost / "progress.json").write_text(json.dumps({"step": 12, "time": BEGIN - 24}))
    assert account(lost).step == 10  # it is of an attempt before
