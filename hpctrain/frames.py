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


def of_main_thread() -> list[FrameType]:
    """Return the frames of the main thread, the innermost last; any thread may call it."""
    return of_thread(sys._current_frames()[threading.main_thread().ident or 0])


def of_thread(frame: FrameType) -> list[FrameType]:
    """Return the frames of a thread from its innermost one, which comes last."""
    return [each for each, _ in traceback.walk_stack(frame)][::-1]


def own(frames: list[FrameType]) -> list[FrameType]:
    """Return the frames of the user's code, of hpctrain, and of libraries other than torch."""
    return [each for each in frames if not _is_of_python_or_torch(each.f_code.co_filename)]


def place(frames: list[FrameType]) -> str:
    """Return the innermost of the `own` frames as `FILE:LINE in NAME`; or ""."""
    if not (found := own(frames)):
        return ""
    code = found[-1].f_code
    return f"{code.co_filename}:{found[-1].f_lineno} in {code.co_name}"


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
