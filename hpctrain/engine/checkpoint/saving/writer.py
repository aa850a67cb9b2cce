"""The process of a rank that writes its part of checkpoints, while the training goes on.

    trainer   ── the state, copied ─────────> shared memory ──┐
              ── a line for each save ──────> its input ──────┴── files
              <── done, or why not ── the head of the shared memory

It is a new Python and no fork, since the threads of gloo and CUDA do not survive one. It ignores
the signals of a job, and ends when its input does and all jobs are done. It is killed together with
the trainer: nobody would commit what it writes, and the next attempt may write into that folder.
"""

import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.base.forks import die_with
from hpctrain.base.processes import child
from hpctrain.base.processes.child import Child
from hpctrain.base.units import readable
from hpctrain.engine.checkpoint.saving.part import RankPart, Staged
from hpctrain.engine.checkpoint.saving.shared_memory import SharedMemory, end_of

log = logging.getLogger(__name__)

_NO_GPU = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_SPARE = 1 << 20  # bytes
_NO_COPY = "what is in the memory for checkpoints is not what the rank has copied to it"
_LONGEST_END_S = 60.0


class Writer:
    """The writer of this rank, whose process is started; its memory has at most `limit` bytes."""

    def __init__(self, limit: float, cwd: Path) -> None:
        self._limit, self._cwd, self._said = limit, cwd, ""
        self._memory = SharedMemory()
        self._memory.report = ""
        # It needs no GPU, where a context of CUDA would take memory of the training.
        variables: dict[str, Any] = {"OMP_NUM_THREADS": "1"} | dict.fromkeys(_NO_GPU, "")
        known = str(os.getpid()), str(self._memory.descriptor)
        module = "hpctrain.engine.checkpoint.saving.writer"
        self.process = Child(module, *known, cwd=self._cwd, **variables)

    def stage(self, job: RankPart) -> Callable[[], str] | None:
        """Copy what a job writes, and let the process write it.

        Returns what writes it once more in this process, after the writer has failed; None if it
        cannot be staged, and nothing is written.
        """
        staged, tensors = job.staged()
        assert isinstance(staged.planner, Staged)
        placed, content = staged.planner.placed, pickle.dumps(staged)
        begin, length = end_of(placed), len(content)
        if why := self._no_room(begin + length):
            why = f"a copy takes {readable(begin + length)} ({why})"
        else:
            self._memory.put(tensors, placed, content)
            if not staged.planner.is_copy(self._memory.bytes()):
                why = _NO_COPY
        if why:
            if why != self._said:
                log.warning("saves stop the training: %s", why)
            self._said = why
            return None
        self._memory.report = None
        self.process.ask(f"{begin} {length}")
        return lambda: _written(self._memory, begin, length)

    def _no_room(self, size: int) -> str:
        """Make the memory as large as that; return why it cannot be, or ""."""
        if self.nbytes >= size:
            return ""
        if size > self._limit:
            return f"half of the node's free memory leaves this rank {readable(self._limit)}"
        try:
            # The next pickle may be a little longer, and memory is made once.
            self._memory.reserve(size + size // 64 + _SPARE)
        except OSError as error:
            return f"{error.strerror}"
        return ""

    @property
    def nbytes(self) -> int:
        """The bytes of the memory."""
        return len(self._memory.bytes())

    @property
    def error(self) -> str | None:
        """Why the last job has failed, "" if it has not; None while it is under way."""
        code = self.process.code  # before the report, which it may still have written
        told = self._memory.report
        if told is not None or code is None:
            return told
        return f"the process that writes checkpoints ended with {code}"

    def revive(self) -> None:
        """Start the process again if it was killed; what it had to do is done by now."""
        self.process.revive()

    def close(self) -> None:
        """End the process after its last job; one that was never asked may still be starting."""
        if self.error == "":
            self.process.kill()
        self.process.end(_LONGEST_END_S)  # a disk that hangs must not hold the run
        self._memory.unpin()


def _written(memory: SharedMemory, begin: int, length: int) -> str:
    """Write the part that lies in the memory; return why it has failed, or ""."""
    job = pickle.loads(memory.bytes()[begin : begin + length].tobytes())
    job.planner.memory = memory.bytes()
    if not job.planner.is_copy(job.planner.memory):
        return _NO_COPY
    error: str = job.write()
    return error


def main() -> None:
    """Be the process: do one job after the other."""
    child.begin()
    trainer, descriptor = map(int, sys.argv[1:])
    die_with(trainer)
    memory = SharedMemory(os.open(f"/proc/{trainer}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    for line in sys.stdin.buffer:
        begin, length = map(int, line.split())
        memory.reserve(begin + length)
        memory.report = _written(memory, begin, length)


if __name__ == "__main__":
    main()
