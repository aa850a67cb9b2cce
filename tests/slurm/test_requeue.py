"""A job asks for its requeue. A stand-in answers for Slurm, whose signals cannot be timed."""

import os
from pathlib import Path

import pytest

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm import requeue as requeuing
from hpctrain.cluster.slurm.container import REQUEUE_NOTE
from hpctrain.cluster.slurm.requeue import requeue
from hpctrain.runs.run_dir import RunDir


@pytest.mark.parametrize(
    ("states", "ended", "requeued"),
    [
        (["RUNNING"], "", True),
        (["SIGNALING", "SIGNALING", "RUNNING"], "", True),
        (["SIGNALING", "COMPLETING"], "", False),  # no accounting
        (["COMPLETING"], "CANCELLED by 0", False),
        (["COMPLETING"], "RUNNING", False),  # accounting that lags behind
        (["COMPLETING"], "PREEMPTED", True),  # without a grace time
        (["COMPLETING"], "FAILED", True),  # its batch script was killed
        (["COMPLETING"], "FAILED 7", True),  # it is the last one of its chain
        (["COMPLETING"], "FAILED 7 8", False),  # the next one of its chain goes on
    ],
)
def test_a_job_is_requeued_unless_somebody_has_cancelled_it(
    states: list[str], ended: str, requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue, scontrol, sacct = (tmp_path / name for name in ("squeue", "scontrol", "sacct"))
    if chain := ended.split()[1:]:
        (tmp_path / "chain").write_text("\n".join(chain))
        monkeypatch.setenv(requeuing.CHAIN, str(tmp_path / "chain"))
    sacct.write_text(f"#!/bin/sh\necho '{ended}'\n")
    answers = tmp_path / "answers"
    answers.write_text("".join(f"{state}\n" for state in states))
    squeue.write_text(f"#!/bin/sh\nhead -n 1 {answers}\nsed -i '1{{$!d}}' {answers}\n")
    scontrol.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
    for program in (squeue, scontrol, sacct):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert requeue("7_1") is requeued
    asked = (tmp_path / "asked").read_text() if requeued else ""
    # First what heals `sbatch --no-requeue` and JobRequeue=0.
    assert asked == ("update JobId=7_1 Requeue=1\nrequeue 7_1\n" if requeued else "")
    assert (tmp_path / "asked").exists() is requeued


@pytest.mark.parametrize("in_container", [True, False])
def test_a_rank_that_is_out_of_memory_asks_for_its_requeue(
    in_container: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain.engine.loop import _lower_micro_batch

    asked: list[object] = []
    monkeypatch.setattr(requeuing, "requeue", asked.append)
    monkeypatch.setattr(requeuing, "leave_note", lambda note, exclude: asked.append(note))
    if in_container:
        monkeypatch.setenv(REQUEUE_NOTE, "/run/requeue")
    ranks = RankInfo("slurm", 1, 1, 0, 2, 2, 1, "n1", 1, job_id="7_1", restart_count=3)
    run = RunDir(tmp_path)
    run.update(attempts=[])
    _lower_micro_batch(run, ranks, 8, 4)
    assert asked == [Path("/run/requeue") if in_container else "7_1"]
    assert (run.read().micro_batch_rows, run.read().lowered_in) == (4, ("7_1", 3, 0))
    # A batch script that can start the ranks again in its job does so.
    (tmp_path / "epochs").write_text("7_1 3 0\n")
    _lower_micro_batch(run, ranks, 4, 2)
    assert (len(asked), run.read().micro_batch_rows) == (1, 2)
