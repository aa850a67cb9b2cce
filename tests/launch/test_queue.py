"""Tests of the scheduler's commands. A stand-in is killed: Slurm's signals cannot be timed."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import Config
from hpctrain.launch.slurm.queue import Job, ask, task_of
from hpctrain.launch.slurm.sbatch import nodes_that_fit, sbatch
from hpctrain.record import convert
from hpctrain.run_record import RunRecord


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `squeue` whose first calls end by SIGTERM; the file `kills` holds their number."""
    program = tmp_path / "squeue"
    program.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")" || exit\necho >>calls\n'
        'if [ "$(wc -l <calls)" -le "$(cat kills)" ]; then kill -TERM $$; fi\necho RUNNING\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(("kills", "answer"), [(0, "RUNNING\n"), (2, "RUNNING\n"), (9, None)])
def test_a_killed_command_is_run_again(
    squeue: Path, kills: int, answer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    (squeue / "kills").write_text(str(kills))
    with caplog.at_level(logging.ERROR):
        assert ask("squeue", "--jobs", "1") == answer
    assert len((squeue / "calls").read_text().splitlines()) == min(kills + 1, 5)
    assert ("died with <Signals.SIGTERM: 15>" in caplog.text) == (answer is None)


@pytest.mark.parametrize(
    "answer", ["12", "12;main", "Welcome to node 3 of 40\n2026\n12\nBalance: 7 SU\n\n"]
)
def test_the_job_id_in_an_answer_of_sbatch(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert sbatch(tmp_path / "script", Config()) == "12"


@pytest.mark.parametrize(
    ("kind", "count", "fitting"),
    [(None, 6, 1), (None, 2, 2), ("a100", 4, 1), ("a100", 5, 0), ("V100", 2, 1), ("h100", 1, 0)],
)
def test_nodes_with_gpus_of_a_type_are_counted(
    kind: str | None, count: int, fitting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho 'batch*|8|16000|gpu:a100:4(S:0-1),gpu:v100:2'\n"
        "echo 'batch*|8|16000|gpu:2'\necho 'other|8|16000|gpu:h100:8'\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = Config()
    config.launch.gpus_per_node, config.site.gpu_type = count, kind
    assert nodes_that_fit(config.launch, config.site) == {"batch": fitting}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"state": "interrupted", "submission": {"script": "/a/job.sh", "task": 3}}, "7_3"),
        ({"state": "queued", "submission": {"script": "/a/job.sh", "task": 4}}, None),
        ({"state": "interrupted", "attempts": [{"job_id": "9"}]}, "9"),
        ({"state": "failed", "attempts": [{"job_id": "9"}]}, None),
        ({"state": "interrupted", "attempts": []}, None),
    ],
)
def test_the_job_of_a_run_is_found_by_its_script_or_by_its_id(
    record: dict[str, Any], expected: str | None
) -> None:
    jobs = {
        ("/a/job.sh", 3): Job("7_3", "PENDING", "BeginTime", "", "N/A"),
        ("job 9", 0): Job("9", "PENDING", "BeginTime", "", "N/A"),
    }
    task = task_of(convert(RunRecord, record, "run.json"), jobs)
    found = jobs.get(task) if task else None
    assert (found and found.id) == expected
