"""The process of a rank that writes its part of checkpoints, while the training goes on.

    trainer    ── a line of JSON for each job ──> standard input
               <── job, error ── the head of the shared memory

It ignores the signals of a job, and ends when its input does and all jobs are done. It is killed
with the trainer: nobody would commit what it writes, and the next attempt may write to that folder.
"""

import ctypes
import json
import os
import shutil
import signal
import sys

from hpctrain.checkpoint.saving.part import Job, Staged
from hpctrain.checkpoint.saving.shared_memory import SharedMemory
from hpctrain.tracking.uploader_process import begin_child

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Do one job after the other."""
    begin_child()
    trainer, memory, at = int(sys.argv[1]), None, -1
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != trainer:
        return
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if memory is None or asked["descriptor"] != at:
            memory, at = SharedMemory.of(trainer, asked["descriptor"]), asked["descriptor"]
        if "remove" in asked:
            shutil.rmtree(asked["remove"], ignore_errors=True)
            error = ""
        else:
            error = written(memory, asked["begin"], asked["length"])
        memory.report = (asked["job"], error)


def written(memory: SharedMemory, begin: int, length: int) -> str:
    """Write the part that lies in the memory; return why it has failed, or ""."""
    job = memory.load(begin, length)
    assert isinstance(job, Job)
    assert isinstance(job.planner, Staged)
    job.planner.memory = memory
    return job.write()


if __name__ == "__main__":
    main()
