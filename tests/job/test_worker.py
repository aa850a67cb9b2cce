"""Ranks that train the trials of a search in turn, in the same processes."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.base.names.run_record import AttemptKey
from hpctrain.base.processes.causes import GPU_MEMORY
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.engine.job.attempt import Attempt
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.search import pieces, worker
from tests.conftest import runs
from tests.made_runs import make_run


def by_kind(folder: Path) -> dict[str, Path]:
    texts = {run: (run / "config.yaml").read_text() for run in runs(folder / "runs")}
    return {re.search(r"kind: (\w+)", text)[1]: run for run, text in texts.items()}  # type: ignore[index]


def test_the_worker_goes_on_after_a_trial_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainings and the verdicts are stand-ins; the real ones are in the slow tests."""
    given = [
        RunDir(make_run(tmp_path, f"digits-0000000{n}", state="running", signature="s"))
        for n in range(3)
    ]
    wrong, large, good = (SimpleNamespace(run=run.path, until=20, metric="loss") for run in given)
    ends: dict[Path, list[Exception | None]] = {
        wrong.run: [ZeroDivisionError()],
        large.run: [MemoryError(), None],
        good.run: [None],
    }

    def trained(run: Path, until: int, ranks: RankInfo) -> int:
        if error := ends[run].pop(0):
            attempt = {"cause": GPU_MEMORY.name, "error": "too large", "state": "failed"}
            RunDir(run).update(attempts=[{"started": 1.0} | attempt])
            raise error
        RunDir(run).update(state="paused", result={"step": until, "loss": 0.5})
        return 0

    told: list[tuple[str, SimpleNamespace]] = []

    left = [wrong, large, good]
    given_by = SimpleNamespace(
        next=lambda: left.pop(0) if left else None,
        settle=lambda piece, error: told.append((error, piece)),
    )

    monkeypatch.setattr(worker, "train_frozen", trained)
    monkeypatch.setattr(worker, "close_tracking", lambda run, code: None)
    judged = {wrong.run: "", large.run: "restart"}
    monkeypatch.setattr(worker, "of_run", lambda run, *_, inside: judged[run.path])
    monkeypatch.setattr(worker, "forget", lambda: True)
    folder = tmp_path / "worker"
    folder.mkdir()
    ranks = RankInfo("single")
    assert worker._lead(given_by, folder, ranks) == 0  # type: ignore[arg-type]
    assert [piece for _, piece in told] == [wrong, large, good]
    assert (told[0][0], told[2][0]) == ("too large", "its training has ended without a result")
    lines = [json.loads(line) for line in (folder / "pieces").read_text().splitlines()]
    begun = [line["run"] for line in lines if line.get("run")]
    assert begun == [str(each.run) for each in (wrong, large, large, good)]
    # CUDA cannot be used any more: the batch script starts the ranks again.
    left += [wrong, good]
    ends[wrong.run].append(ZeroDivisionError())
    monkeypatch.setattr(worker, "forget", lambda: False)
    assert worker._lead(given_by, folder, ranks) == 143  # type: ignore[arg-type]
    assert left == [good]


def test_ranks_heed_the_lines_of_their_own_step(tmp_path: Path) -> None:
    before, now = AttemptKey("7", 0, 0), AttemptKey("7", 0, 3)
    assert pieces.current(tmp_path, now) is None
    assert pieces.steps_without(tmp_path, now) == 4
    pieces.add(tmp_path, before, run="/runs/a", until=5)
    assert pieces.current(tmp_path, now) is None
    assert pieces.current(tmp_path, before) is not None
    assert pieces.steps_without(tmp_path, now) == 3
    pieces.add(tmp_path, now, run="/runs/b", until=7)
    follow = pieces.follow(tmp_path, now)
    assert next(follow).run == "/runs/b"
    pieces._append(tmp_path, "")
    pieces.add(tmp_path, now)
    assert pieces.current(tmp_path, now) is None
    assert pieces.steps_without(tmp_path, now) == 0
    pieces.add(tmp_path, now, code=143)
    assert [each.code for each in (next(follow), next(follow))] == [None, 143]


def test_a_rank_ends_when_rank_0_gives_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Exception):
        pass

    def end(why: str) -> Any:
        raise Ended(why)

    clock = iter(range(0, 10_000, 400))
    monkeypatch.setattr(pieces, "end_at_once", end)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(Ended, match="rank 0 gives no sign of life"):
        next(pieces.follow(tmp_path, AttemptKey("7")))


def test_a_worker_that_was_cancelled_asks_for_no_more_trials(tmp_path: Path) -> None:
    stop_request.write(tmp_path, "ann")
    asked: list[object] = []
    idle: Any = SimpleNamespace(next=lambda: asked.append(idle))
    assert worker._lead(idle, tmp_path, RankInfo("single", worker=str(tmp_path))) == 0
    assert asked == []


def test_a_cancel_after_the_worker_has_taken_the_trial_holds(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path, "digits-00000000", state="created", signature="s"))
    for ranks, held in (
        (RankInfo("single", worker=str(tmp_path)), True),
        (RankInfo("single"), False),
    ):
        stop_request.write(run.path, "ann")
        begins: Any = SimpleNamespace(_ranks=ranks, _run=run)
        Attempt._drop_old_stop_request(begins)
        assert bool(stop_request.read(run.path)) == held
