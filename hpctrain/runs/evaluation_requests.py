"""The evaluations that a run has asked for: `evaluations/jobs/step-00000200/` in its directory.

    asked.json   {"step": 200, "tries": 1, "job_id": "123", "given_up": false}
    job.sh       the batch script; the scheduler knows the job by its path
    batch/       what the batch script has printed

Only rank 0 of the training writes here. The result is elsewhere (`hpctrain.tracking.recorded`).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.disk import write_atomically
from hpctrain.errors import DamageError
from hpctrain.record import Count, JobId, read
from hpctrain.step_names import of_steps, step_name
from hpctrain.tracking import recorded

_FILE = "asked.json"


@dataclass(frozen=True)
class EvaluationRequest:
    """One evaluation that was asked for."""

    step: Count  # the global step of the checkpoint
    tries: Count = 0  # how often a job was submitted
    job_id: JobId | None = None  # of the last job; None if it is not known
    given_up: bool = False  # whether no further job is submitted
    folder: Path = Path()  # of its job; it is not in the file

    @classmethod
    def of(cls, run_dir: Path, step: int) -> EvaluationRequest:
        """Return a new one, which is not written yet."""
        return cls(step, folder=_folder(run_dir) / step_name(step))

    @property
    def script(self) -> Path:
        """The path of the batch script."""
        return self.folder / "job.sh"

    def write(self) -> EvaluationRequest:
        """Write the file, and return the same."""
        self.folder.mkdir(parents=True, exist_ok=True)
        body = dataclasses.asdict(self)
        del body["folder"]
        write_atomically(self.folder / _FILE, json.dumps(body) + "\n")
        return self

    def remove(self) -> None:
        """Remove the folder, as clusters limit the number of files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def asked(run_dir: Path) -> list[EvaluationRequest]:
    """Return the evaluations that were asked for, with a result or not, in order of their steps."""
    found = []
    for folder in of_steps(_folder(run_dir)):
        with suppress(FileNotFoundError, DamageError):
            one = read(EvaluationRequest, folder / _FILE, parts=4)
            found.append(dataclasses.replace(one, folder=folder))
    return found


def without_result(run_dir: Path) -> list[EvaluationRequest]:
    """Return those that have no result: they wait, run, or have failed."""
    every = asked(run_dir)
    done = recorded.steps(run_dir) if every else set()
    return [one for one in every if one.step not in done]


def _folder(run_dir: Path) -> Path:
    return run_dir / "evaluations" / "jobs"
