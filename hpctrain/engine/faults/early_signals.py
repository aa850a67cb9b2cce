"""Signals that arrive before the training can act on them.

Importing torch takes seconds, on a busy file system minutes. A preemption signal in that time
would kill the ranks, and Slurm would count the job as failed and not requeue it. So the signals are
noted from the first line on. `hpctrain.engine.faults.stop` takes them over, and the run then saves,
requeues and stops as soon as it can.
"""

import signal
from types import FrameType

from hpctrain.base import forks
from hpctrain.base.processes import marks

noted: list[int] = []


def note() -> None:
    """Note the signals of preemption and time limit, which would otherwise end the process.

    SIGINT ends the process at once, as Ctrl-C should before anything is trained. Where it is
    ignored, as by submitit's local controller, it would be lost; so it is noted there, too.
    """
    for number in (signal.SIGTERM, signal.SIGUSR2):
        forks.handle(number, _note)
    marks.open_page()  # SIGUSR1 asks for stacks
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        forks.handle(signal.SIGINT, _note)


def heed_ctrl_c() -> None:
    """Let SIGINT raise KeyboardInterrupt also where the process was started with SIGINT ignored.

    A shell script starts `command &` so, and CI systems do. Python then installs no handler, and
    neither Ctrl-C nor `kill -INT` would stop the command. Other signals keep what they inherit:
    `nohup` has SIGHUP ignored on purpose.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _note(number: int, frame: FrameType | None) -> None:
    noted.append(number)
