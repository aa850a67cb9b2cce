"""Which line of a stack is the user's: neither Python's own, nor torch's.

A stack is one of this process, or a text that `faulthandler` has written for another one.
"""

import functools
import importlib.util
import re
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

_LINE = re.compile(r'File "(.*)", line (\d+) in (.*)')


Stack = list[tuple[FrameType, int]]
"""Frames with their lines, the innermost last."""


def of_main_thread() -> Stack:
    """Return the frames of the main thread; any thread may call it."""
    return of_thread(sys._current_frames()[threading.main_thread().ident or 0])


def of_thread(frame: FrameType) -> Stack:
    """Return the frames of a thread from its innermost one."""
    return [*traceback.walk_stack(frame)][::-1]


def of_error(error: BaseException) -> Stack:
    """Return the frames through which an error has come."""
    return [*traceback.walk_tb(error.__traceback__)]


def own(stack: Stack) -> list[FrameType]:
    """Return the frames of the user's code, of hpctrain, and of libraries other than torch."""
    return [each for each, _ in stack if not _is_of_python_or_torch(each.f_code.co_filename)]


def place(stack: Stack) -> str:
    """Return the innermost of the `own` frames as `FILE:LINE in NAME`; or ""."""
    for frame, line in reversed(stack):
        if own([(frame, line)]):
            return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return ""


def place_in(stacks: str) -> str:
    """Return the same of the thread that `faulthandler` calls the current one; or ""."""
    lines = _LINE.findall(stacks.rpartition("Current thread")[2])
    return next((f"{f}:{n} in {c}" for f, n, c in lines if not _is_of_python_or_torch(f)), "")


def _is_of_python_or_torch(file: str) -> bool:
    if file.startswith((*_torch(), "<frozen")):
        return True
    return file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file


@functools.cache
def _torch() -> tuple[str, ...]:
    """Return the folder of torch, without importing it."""
    found = importlib.util.find_spec("torch")
    return (f"{Path(found.origin).parent}/",) if found and found.origin else ()
