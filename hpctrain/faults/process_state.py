"""What /proc tells about a rank, and what it means together with what the rank says itself.

    T                the thread is silent or not   stopped
    D                                              uninterruptible
    Z, or not there                                dead
    R or S           it is silent                  C code that holds Python's lock
    R                Python's lock is free         C code without the lock
    R                it is not                     busy in Python
    S                                              asleep: a sleep, a file, a lock

On the left is what /proc says of the main thread.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.tracking.uploader_process import Process

DEAD, STOPPED, UNINTERRUPTIBLE = "dead", "stopped", "uninterruptible"
HOLDS_LOCK, C_CODE, PYTHON, ASLEEP = "C code with the lock", "C code", "Python", "asleep"
NO_DATA, COLLECTIVE, SILENT = "no data", "in a collective", "silent"
# How the states are told in a sentence, of "it".
WORDS = {
    STOPPED: "is stopped (SIGSTOP, or a debugger)",
    UNINTERRUPTIBLE: "is uninterruptible (state D): it waits in the kernel for a file or a device, "
    "or its control group is frozen",
    HOLDS_LOCK: "is in C code that holds Python's lock",
    C_CODE: "computes in C code that has released Python's lock",
    PYTHON: "computes in Python",
    ASLEEP: "sleeps, or waits for something",
    NO_DATA: "waits for data",
    COLLECTIVE: "waits for other ranks",
}


class Sample(NamedTuple):
    """What the main thread of a process was doing at one moment."""

    state: str  # the letter of /proc
    cpu_s: float


def look(process: Process) -> Sample | None:
    """Return what the main thread does; None if the process has ended."""
    fields: list[str] = []
    with suppress(OSError):
        text = Path(f"/proc/{process.pid}/task/{process.pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
    if not fields or fields[0] in "ZX" or int(fields[19]) != process.started:
        return None
    return Sample(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def state_of(
    samples: Sequence[Sample | None], silent: bool, answer: Mapping[str, Any]
) -> str | None:
    """Return the state of a rank from its last samples; None if it is not known yet.

    `silent` says that a thread of the rank gives no signs. `answer` is what it has answered to the
    question where the rank is; empty if it has not.
    """
    letters = [sample.state if sample else "" for sample in samples]
    if not letters[-1]:
        return DEAD
    if letters[-1] in "Tt":
        return STOPPED
    if {*letters} == {"D"}:
        return UNINTERRUPTIBLE
    if silent:
        return HOLDS_LOCK
    if not answer:
        return None
    if answer.get("waits_in"):
        return COLLECTIVE
    if answer.get("data"):
        return NO_DATA
    if 2 * letters.count("R") > len(letters):
        return C_CODE if answer.get("lock_is_free") else PYTHON
    return ASLEEP
