"""The end of a rank that has failed while other ranks may wait for it.

    an exception ── the failure is recorded ── the error is printed ── os._exit, without a teardown
                    run.json, logs, journal

NCCL's `destroy_process_group` is collective among the ranks of a node: a rank that fails would wait
in it for the others, which wait for this rank in a collective operation. Nobody would exit, so
neither Slurm nor torchrun would end the job before the timeout. So the group of a failed rank stays
open, and the process ends without the teardown of Python and torch, which may wait as well.

This module does not import torch, because the command line imports it.
"""

import logging
import os
import resource
import sys
from contextlib import suppress
from typing import NoReturn

log = logging.getLogger(__name__)
_NO_MEMBER = 143  # as if Slurm had ended it
_open = False


def write_no_core_dump() -> None:
    """Let the abort of this rank leave no copy of its memory on disk; HPCTRAIN_DEBUG=1 allows it.

    NCCL's watchdog aborts all ranks of a job at once, and each has mapped tens of GB.
    """
    if not os.environ.get("HPCTRAIN_DEBUG"):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def leave_group_open() -> None:
    """Note that this rank has failed and that its process group must not be destroyed."""
    global _open
    _open = True


def exit_at_once_if_group_is_open(code: int) -> None:
    """End this process with `code` and without any teardown, if its rank has failed.

    Only a program that is nothing but a rank calls this, after everything was written to disk: not
    a notebook, nor a user's program that has called `hpctrain.train()`.
    """
    if _open:
        _exit(code)


def end_at_once(why: str) -> NoReturn:
    """End this rank, which no longer belongs to its run, and must not write there."""
    log.error("%s", why)
    _exit(_NO_MEMBER)


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
