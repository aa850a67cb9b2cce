"""What a rank knows of the process that writes its checkpoints: see `saving.writer`."""

import json
import logging
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.saving.part import Job, Staged
from hpctrain.checkpoint.saving.shared_memory import SharedMemory, end_of
from hpctrain.checkpoint.saving.writer import written
from hpctrain.tracking.uploader_process import start_child
from hpctrain.units import readable

log = logging.getLogger(__name__)

_NO_GPU = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_RESTARTS = 5  # of a writer that was killed
_LOOK_S = 0.005


class Writer:
    """The writer of this rank, which is started at once; its memory has at most `limit` bytes."""

    def __init__(self, limit: float, cwd: Path) -> None:
        self._limit, self._cwd = limit, cwd
        self._memory: SharedMemory | None = None
        self._jobs = self._restarts = 0
        self._said = ""
        self._start()

    def _start(self) -> None:
        # It needs no GPU, where a context of CUDA would take memory of the training.
        hidden = dict.fromkeys(_NO_GPU, "")
        module, trainer = "hpctrain.checkpoint.saving.writer", str(os.getpid())
        self.process = start_child(
            *(module, trainer), cwd=self._cwd, log_file=None, OMP_NUM_THREADS="1", **hidden
        )

    def stage(self, job: Job) -> Callable[[], str] | None:
        """Copy what a job writes, and let the process write it.

        Returns what writes it once more in this process, after the writer has failed; None if it
        cannot be staged, and nothing is written.
        """
        if self.process.poll() is not None:
            return None
        staged, tensors = job.staged()
        assert isinstance(staged.planner, Staged)
        placed, content = staged.planner.placed, pickle.dumps(staged)
        begin, length = end_of(placed), len(content)
        memory = self._room(begin + length)
        if memory is None:
            return None
        memory.put(tensors, placed, content)
        self._ask(begin=begin, length=length)
        return lambda: written(memory, begin, length)

    def _room(self, size: int) -> SharedMemory | None:
        """Return memory of so many bytes; None if there is not so much."""
        before = self._memory
        if before is not None and len(before.content) >= size:
            return before
        why = ""
        if size > self._limit:
            why = f"checkpoint.staging_gb has {readable(self._limit)} for it"
        else:
            try:
                self._memory = SharedMemory(size)
            except OSError as error:
                why = f"{error.strerror}"
        if why:
            if why != self._said:
                log.warning(
                    "a save takes %s of memory (%s): it stops the training", readable(size), why
                )
            self._said = why
            return None
        if before is not None:
            before.close()
        return self._memory

    def _ask(self, **job: Any) -> None:
        assert self._memory is not None
        assert self.process.stdin is not None
        self._jobs += 1
        line = json.dumps(job | {"job": self._jobs, "descriptor": self._memory.descriptor})
        with suppress(BrokenPipeError):  # it is dead, as `error` says
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    @property
    def error(self) -> str | None:
        """Why the last job has failed, "" if it has not; None while it is under way."""
        if self._memory is None:
            return ""
        done, error = self._memory.report
        if done == self._jobs:
            return error
        code = self.process.poll()
        if code is None or self._memory.report[0] == self._jobs:
            return None
        return f"the process that writes checkpoints has ended with {code}"

    def wait(self) -> str:
        """Wait until the process has done all its jobs, and return the last error; "" if none."""
        while (error := self.error) is None:
            time.sleep(_LOOK_S)
        return error

    def revive(self) -> None:
        """Start the process again if it was killed; what it had to do is done by now."""
        if self.process.poll() is None or self._restarts == _RESTARTS:
            return
        self.close()
        if self._memory is not None:
            self._memory.report = (self._jobs, "")
        self._restarts += 1
        again = "saves stop the training from now on" * (self._restarts == _RESTARTS)
        log.warning(
            "the process that writes checkpoints was killed; %s", again or "it is started again"
        )
        if not again:
            self._start()

    def remove(self, folder: Path) -> bool:
        """Let the process remove a folder; False if it cannot."""
        if self._memory is None or self.process.poll() is not None:
            return False
        self._ask(remove=str(folder))
        return True

    def close(self) -> None:
        """End the process after its last job; one that was never asked may still be starting."""
        assert self.process.stdin is not None
        if self.error == "":
            self.process.kill()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
