"""A job asks for its requeue. A stand-in answers for Slurm, whose signals cannot be timed."""

import os
from pathlib import Path

import pytest

from hpctrain.job.requeue import requeue


@pytest.mark.parametrize(
    ("states", "requeued"),
    [
        (["RUNNING"], True),
        (["SIGNALING", "SIGNALING", "RUNNING"], True),
        (["SIGNALING", "COMPLETING"], False),
        (["COMPLETING"], False),
    ],
)
def test_only_a_running_job_is_requeued(
    states: list[str], requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue, scontrol = tmp_path / "squeue", tmp_path / "scontrol"
    answers = tmp_path / "answers"
    answers.write_text("".join(f"{state}\n" for state in states))
    squeue.write_text(f"#!/bin/sh\nhead -n 1 {answers}\nsed -i '1{{$!d}}' {answers}\n")
    scontrol.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n')
    for program in (squeue, scontrol):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert requeue("7_1") is requeued
    assert (tmp_path / "asked").exists() is requeued
