"""A command of Slurm in this terminal, which holds an allocation or a step as long as we live.

    this process ── salloc ── srun ── bash          an allocation of its own
                └── srun --jobid --overlap ── bash   a step in the job of a run

Ctrl-C, SIGTERM, the end of the terminal (SIGHUP) and the death of this process end the command.
salloc gives its job back then, and who is told to end looks after it.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hpctrain.base.forks import at_end_of_parent
from hpctrain.cluster.slurm.queue import call

_GRACE_S = 15  # salloc and srun tell their nodes the end, and wait for it
_AGAIN_S = 2  # salloc misses a Ctrl-C in the moment in which it begins to wait


def run_held(command: Sequence[str], env: Mapping[str, str], job_name: str) -> int:
    """Run a command of Slurm to its end; return its exit code.

    A job of this name, which no other job has, is cancelled if the command was told to end. "" is
    no job: that of a run is left alone.
    """
    told: list[int] = []  # signals; Ctrl-C only where the step has not the terminal
    held: list[subprocess.Popen[bytes]] = []

    def tell(number: int, _: Any) -> None:
        """Tell the command to end, and at last end it."""
        again = number == signal.SIGALRM
        told.extend([] if again else [number])
        if {*told} == {signal.SIGINT}:
            # The terminal has told it the first time, and salloc may have missed it.
            send, pause = signal.SIGINT if again else 0, _AGAIN_S
        else:
            send, pause = signal.SIGKILL if again else signal.SIGTERM, _GRACE_S
        for process in held:
            process.send_signal(send)
        signal.alarm(pause)

    handlers = dict.fromkeys((signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGALRM), tell)
    before = {number: signal.signal(number, each) for number, each in handlers.items()}
    try:
        process = subprocess.Popen(
            command, env={**env}, preexec_fn=partial(at_end_of_parent, signal.SIGTERM)
        )
        held.append(process)
        if told:  # before there was a process
            process.terminate()
        code = process.wait()
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if told and job_name:
            # The command gives its job back, unless the controller was busy.
            with suppress(OSError, subprocess.TimeoutExpired):
                call("scancel", "--quiet", f"--user={os.getuid()}", f"--name={job_name}")
    if told and (code or {*told} != {signal.SIGINT}):
        return 128 + told[0]
    return code if code >= 0 else 128 - code
