"""What Slurm and Linux say of the job that this process is a part of."""

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpctrain import cgroup
from hpctrain.causes import HOST_MEMORY, OF_SLURM, Cause
from hpctrain.slurm.queue import ask


def cause_of_step(
    step_id: int,
    env: Mapping[str, str] = os.environ,
    groups: Iterable[Path] | None = None,
) -> Cause | None:
    """Return why a step of this job has ended, if `sacct` or the control group of the job knows."""
    step = f"{env.get('SLURM_JOB_ID', '')}.{step_id}"
    if step[0] != "." and shutil.which("sacct"):
        command = ("sacct", "--noheader", "--parsable2", f"--jobs={step}", "--format=State")
        state = (ask(*command, quiet=True) or "").partition("\n")[0]
        if state:
            return OF_SLURM.get(state.split()[0])
    # The counts of a group have those of the steps in it, also after their end.
    for group in cgroup.folders("memory") if groups is None else groups:
        if group.name == f"job_{env.get('SLURM_JOB_ID')}":
            said = "\n".join(cgroup.text(group, f"memory.{n}") for n in ("events", "oom_control"))
            if re.search(r"^oom_kill [1-9]", said, re.MULTILINE):
                return HOST_MEMORY
    return None
