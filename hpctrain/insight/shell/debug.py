"""A rank that waits for a debugger.

`python -m hpctrain.insight.shell.debug RUN first|error RANK|all`:

    first ── a part of the run waits before its first step, and stops there
    error ── the exception that ends the rank: its frames and their values are still there

The run goes on from its last checkpoint with the exact next batch, so an error comes again. Nobody
takes a rank that waits for one that hangs, and no collective operation gives up.
"""

import logging
import sys
import threading
from pathlib import Path
from typing import Any

from hpctrain.base.errors import HpctrainError
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import Config
from hpctrain.data.shards.types import Batch
from hpctrain.engine.job.here import log_to_stderr, train_frozen
from hpctrain.engine.part import Part
from hpctrain.insight.shell.tools import require, tunnel

log = logging.getLogger(__name__)
_WAIT_S = 7 * 86_400  # of the ranks that wait for the one that is looked at
_FIRST_STEP = "hpctrain.insight.shell.debug._FirstStep"


class _FirstStep(Part):
    """Waits for a debugger before the first step, and stops there."""

    def __init__(self) -> None:
        self._waited = False

    def before_step(self, batch: Batch) -> None:
        if self._waited:
            return
        self._waited = True
        _wait("the first step")
        import debugpy

        debugpy.breakpoint()  # the next call is the step of your loop; `batch` is its batch


def main(argv: list[str]) -> int:
    """Train the run; return the exit code."""
    path, when, chosen = argv
    require("debug")
    ranks = RankInfo.from_env()
    mine = chosen in ("all", str(ranks.rank))
    try:
        return train_frozen(Path(path), change=lambda config: _prepare(config, when, mine))
    except Exception as error:
        if when == "first" or not mine:
            raise
        log.exception("the error of rank %d", ranks.rank)
        _wait(f"its {type(error).__name__}")
        _stop_at(error)
        raise


def _prepare(config: Config, when: str, mine: bool) -> None:
    """Let the ranks of this process wait as long as a person needs."""
    config.hang.floor_s = None
    config.parallel.timeout_s = _WAIT_S
    if when == "first" and mine:
        config.hooks = [{"_target_": _FIRST_STEP}, *config.hooks]


def _wait(where: str) -> None:
    """Open a port for a debugger, say how to reach it, and wait until one is there."""
    import debugpy

    ranks = RankInfo.from_env()
    _, port = debugpy.listen(("127.0.0.1", 0))
    print(
        f"rank {ranks.rank} waits for a debugger at {where}. On your own machine:\n"
        f"    {tunnel(port)}\n"
        f"then attach to localhost:{port} (VS Code: Python Debugger: Remote Attach)",
        flush=True,
    )
    debugpy.wait_for_client()


def _stop_at(error: BaseException) -> None:
    """Let the debugger stop where the exception was raised, as at an unhandled one."""
    import pydevd

    debugger: Any = pydevd.get_global_debugger()
    thread = threading.current_thread()
    facts = debugger.set_additional_thread_info(thread)
    facts.is_tracing += 1
    try:
        caught = type(error), error, error.__traceback__
        debugger.stop_on_unhandled_exception(debugger, thread, facts, caught)
    finally:
        facts.is_tracing -= 1


if __name__ == "__main__":
    log_to_stderr()
    try:
        sys.exit(main(sys.argv[1:]))
    except HpctrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
