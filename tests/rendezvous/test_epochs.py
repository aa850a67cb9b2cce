"""A rank of an older step of a run ends itself before it writes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hpctrain.base.names.run_record import AttemptKey
from hpctrain.cluster.ranks import epochs, leaving
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import Config
from hpctrain.config.sections import RunSections
from hpctrain.engine.job.attempt import Attempt
from hpctrain.engine.steps.stepping import Outcome
from hpctrain.errors import DataError
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure
from hpctrain.tracking import journal

OLD = AttemptKey("7_1", 0, 1)


@pytest.mark.parametrize(
    ("lines", "in_loop", "over", "follows"),
    [
        ("", False, False, False),
        ("7_1 0 1\n", True, False, False),
        ("7_1 0 0\n7_1 0 1\n", True, False, True),
        ("7_1 0 1\n7_1 0 2\n", True, True, True),
        ("6 0 3\n7_1 0 1\n7_1 1 0\n", True, True, False),  # Slurm has requeued the job meanwhile
        ("7_1 0 1\n8 0 0\n", True, True, False),
        ("7_1 0 1\n7_1 0 ", True, False, False),  # a line that is being written
        ("8 0 0\n", False, False, False),  # ranks of `torchrun` write no line
    ],
)
def test_the_last_line_is_the_epoch(
    lines: str,
    in_loop: bool,
    over: bool,
    follows: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if lines:
        (tmp_path / "epochs").write_text(lines)
    ended: list[str] = []
    monkeypatch.setattr(epochs, "end_at_once", ended.append)
    epochs.end_if_over(tmp_path, OLD)
    assert (epochs.in_loop(tmp_path, OLD), len(ended)) == (in_loop, over)
    assert epochs.follows(tmp_path, OLD) is follows


def attempt(run: RunDir) -> Attempt:
    what = RunSections.of(Config())
    return Attempt(what, run, RankInfo("slurm", job_id="7_1", step_id=1))


def fails(run: RunDir) -> None:
    with failure.recorded(run.path, OLD):
        raise DataError("of a rank that should be dead")


def logs(run: RunDir) -> None:
    check = partial(epochs.end_if_over, run.path, OLD)
    journal.Journal(run.path, check=check).append("tags", tags={})


@pytest.mark.parametrize(
    "write",
    [
        fails,
        logs,
        lambda run: attempt(run).ended(Outcome(9, 0, True, "", {}), ""),
        lambda run: attempt(run).ended(Outcome(9, 0, False, "", {}), "SIGTERM"),
        lambda run: attempt(run)._record_failure(DataError("of a rank that should be dead")),
    ],
)
def test_it_writes_no_error_no_metrics_and_no_result(
    write: Callable[[RunDir], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the process is an exception here; on the cluster it is a real one."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(leaving, "_exit", end)
    monkeypatch.setattr(journal, "_CHECK_S", -1.0)
    (tmp_path / "epochs").write_text("7_1 0 1\n7_1 0 2\n")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(SystemExit):
        write(RunDir(tmp_path))
    written = {file.name: file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()}
    assert {name for name, size in written.items() if size} == {"epochs", "run.json"}
    assert (tmp_path / "run.json").read_text() == "{}"
