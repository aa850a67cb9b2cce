"""Patience with a scheduler that limits calls: the rate of watchers, and pauses after a refusal.

Sites refuse more than one submission a second, 40 in a burst or 4 calls a minute of one user, and a
busy controller does not answer in time. A call that was refused for that is repeated, later and
later; a bar says why the command waits.
"""

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hpctrain.base.terminal.console import Console

log = logging.getLogger(__name__)

WATCH_S = 60.0
"""Seconds after which a watcher asks again: one `squeue`, and one `sacct` for jobs that left it."""

REFUSED_S = (2.0, 4.0, 8.0, 15.0, 30.0, *(60.0,) * 5)
"""The pauses before a call is repeated that was one of too many."""
_LATE_S = REFUSED_S[:2]
"""The same for a question that was not answered in time; more would not help a busy controller."""

_TOO_MANY = re.compile(
    r"rate[ -]?limit|throttl|submi\w+ rate|too many (requests|submissions|calls|rpcs)|"
    r"(requests?|submissions?|calls?|rpcs?|jobs?) (per|a) (second|minute|hour)",
    re.I,
)
_LATE = re.compile(r"timed out", re.I)
_QUESTIONS = ("squeue", "sacct", "sinfo", "sacctmgr")


def pauses(command: tuple[str, ...], said: str) -> tuple[float, ...]:
    """Return after which pauses a command is repeated that has failed and said this; often none."""
    if _TOO_MANY.search(said):
        return REFUSED_S
    asks = command[0] in _QUESTIONS or (command[0] == "scontrol" and "show" in command)
    return _LATE_S if asks and _LATE.search(said) else ()


def pause(seconds: float, why: str) -> None:
    """Wait; on a terminal a bar shows how long, and elsewhere a line of the log."""
    if not sys.stderr.isatty() or not seconds:
        if seconds:
            log.warning("%s: asking again in %g s", why, seconds)
        time.sleep(seconds)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        waited = bar.add_task(f"{why[:60]}: asking again", total=seconds)
        while not bar.finished:
            time.sleep(min(0.2, seconds))
            bar.advance(waited, min(0.2, seconds))


answers: ContextVar[dict[tuple[str, ...], tuple[float, str]] | None] = ContextVar(
    "answers", default=None
)
"""The last answers that a watcher has got, and when; nobody else has them."""


@contextmanager
def watching() -> Iterator[None]:
    """Within it, a question is asked again only after WATCH_S seconds."""
    token = answers.set({})
    try:
        yield
    finally:
        answers.reset(token)
