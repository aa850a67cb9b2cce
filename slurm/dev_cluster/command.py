"""Run programs and wait for them; `Failure` is an error for the user."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable


class Failure(Exception):
    """An error message for the user, with the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def run(command: str | list[str], stdin: str = "", check: bool = True) -> str:
    """Run a command without a shell; return its output, or raise Failure with its error message."""
    words = shlex.split(command) if isinstance(command, str) else command
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    if check and done.returncode:
        message = (done.stderr or done.stdout).strip()
        raise Failure(f"{words[0]} failed ({done.returncode}): {message}")
    return done.stdout.strip()


def wait_for(what: str, ready: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `ready` returns a true value; raise Failure after `seconds`."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise Failure(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.05)


def require_root() -> None:
    """Raise Failure if the user is not root."""
    if os.geteuid():
        again = shlex.join(["sudo", sys.executable, *sys.orig_argv[1:]])
        raise Failure(f"needs root, to make network namespaces and mounts: {again}", 4)
