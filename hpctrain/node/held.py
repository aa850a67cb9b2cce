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


def run_held(command: Sequence[str], env: Mapping[str, str], job_name: str) -> int:
    """Run a command of Slurm to its end; return its exit code.

    A job of this name, which no other job has, is cancelled if the command was told to end. "" is
    no job: that of a run is left alone.
    """
    heard: list[int] = []
    typed: list[int] = []  # Ctrl-C before the step had the terminal, or where it has none
    held: list[subprocess.Popen[bytes]] = []

    def end(number: int, _: Any) -> None:
        heard.append(number)
        for process in held:
            process.send_signal(signal.SIGKILL if number == signal.SIGALRM else signal.SIGTERM)
        if number != signal.SIGALRM:
            signal.alarm(_GRACE_S)

    handlers = {
        # Ctrl-C reaches the command, too, which ends by it.
        signal.SIGINT: lambda number, _: typed.append(number),
        **dict.fromkeys((signal.SIGHUP, signal.SIGTERM, signal.SIGALRM), end),
    }
    before = {number: signal.signal(number, each) for number, each in handlers.items()}
    try:
        process = subprocess.Popen(
            command, env={**env}, preexec_fn=partial(at_end_of_parent, signal.SIGTERM)
        )
        held.append(process)
        if heard:  # before there was a process
            process.terminate()
        code = process.wait()
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if heard and job_name:
            # The command gives its job back, unless the controller was busy.
            with suppress(OSError, subprocess.TimeoutExpired):
                call("scancel", "--quiet", f"--user={os.getuid()}", f"--name={job_name}")
    if told := [*heard, *(typed if code else [])]:
        return 128 + told[0]
    return code if code >= 0 else 128 - code
