"""A rank lets its node's observer see whether it gets on.

every rank             ── its page (`marks`), and RUN/logs/observed/nodeN.LOCAL_RANK, which
                          tells where that is
rank with local_rank 0 ── starts the observer (`hpctrain.engine.faults.observer`)
a thread               ── gives a sign of life, and answers where the main thread is
                       ── late: torch's flight recorder into RUN/logs/flight_recorder_RANK, since
                          NCCL's watchdog writes it after `parallel.timeout_s`
"""

import logging
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

from hpctrain.base.errors import LateRankError
from hpctrain.base.files.record import written
from hpctrain.base.names.run_record import Hang
from hpctrain.base.processes import frames, marks
from hpctrain.base.processes.child import Child, Process
from hpctrain.cluster.ranks.flight_recorder import PREFIX
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import HangConfig
from hpctrain.engine.faults.observer import FOLDER
from hpctrain.engine.faults.process_state import ObserverSettings, PagePlace

log = logging.getLogger(__name__)
_BEAT_S, _END_S = 0.5, 2.0
_MOST_OBSERVERS = 10  # of an attempt: where they are always killed, no more are started
# While torch compiles, or somebody debugs, nobody knows how long it takes. Autograd compiles the
# backward pass in threads of its own, and a debugger always has some.
_DEBUGS = re.compile(r"/(pdb|bdb|pydevd)\.py$|/debugpy/")
_TIMED_OUT = re.compile(r"gloo.*time(d )?out|(wait|socket) timeout", re.I | re.S)
_COMPILES = {"compile_fx_inner", "fx_codegen_and_compile", "compile_fx"}


@contextmanager
def observed(config: HangConfig, logs: Path, ranks: RankInfo, timeout_s: float) -> Iterator[None]:
    """Let the ranks of this node be observed during the context.

    `logs` is the folder of the run's logs, and `timeout_s` is `parallel.timeout_s`.
    """
    page = marks.open_page()
    page.begin()
    if config.floor_s is None:
        yield
        return
    if ranks.is_main:
        Hang.drop(logs.parent)  # of an attempt before
    short = replace(ranks, hosts=())  # an argument of a process must not be long
    job = ObserverSettings(ranks=short, floor_s=config.floor_s, timeout_s=timeout_s)
    over, observers = threading.Event(), list[Child]()

    def beat() -> None:
        answering, known, recorded_at = threading.Thread(), False, 0.0
        while True:
            page.is_alive()
            for observer in observers:  # else the node would be taken for silent
                observer.revive(_MOST_OBSERVERS)
            if not known and logs.is_dir():  # rank 0 has made it
                known = True
                try:
                    observers.extend(_make_known(page, logs, job))
                except OSError as error:
                    log.warning("nobody watches whether the ranks of this node get on: %s", error)
            marked = page.marks()
            if marked.asked > marked.answered and not answering.is_alive():
                # Once until the next mark, since all ranks do it at the same time.
                once = ranks.world_size > 1 and marked.at != recorded_at
                file = logs / f"{PREFIX}{ranks.rank}" if once else None
                recorded_at = marked.at
                answering = threading.Thread(target=_answer, args=(page, file), daemon=True)
                answering.start()
            if over.wait(_BEAT_S):
                return

    thread = threading.Thread(target=beat, name="hpctrain-marks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        marks.leave()
        over.set()
        thread.join(_END_S)  # it may write to a file system that hangs
        for observer in observers:
            observer.release()
            # The observer of several ranks ends with the last of them.
            observer.wait(_END_S if ranks.local_world_size == 1 else 0)


def timed_out(
    error: Exception, run: Path, ranks: RankInfo, timeout_s: float, since: float
) -> LateRankError | None:
    """Return what the observers say, since a time, of a collective operation that has timed out.

    None if the error is another one.
    """
    if not _TIMED_OUT.search(str(error)):
        return None
    hang = Hang.of(run, ranks.attempt_key, since)
    said = hang.sentence if hang else f"rank {ranks.rank} waits for others ({error})"
    return LateRankError(
        f"{said} (parallel.timeout_s={timeout_s:g}; stacks of the ranks: {run}/logs/{FOLDER})"
    )


def _make_known(page: marks.Page, logs: Path, job: ObserverSettings) -> Iterator[Child]:
    """Write where the page is, and start the observer if this is the first rank of the node."""
    ranks, me = job.ranks, Process.current()
    place = PagePlace(ranks.rank, me.pid, me.started, page.descriptor, page.marks().begun)
    place.put(logs.parent, f"{ranks.node_rank}.{ranks.local_rank}")
    if ranks.local_rank == 0:
        run, module = str(logs.parent.absolute()), "hpctrain.engine.faults.observer"
        yield Child(module, run, written(job), cwd=logs.parent)


def _answer(page: marks.Page, file: Path | None = None) -> None:
    """Answer where this rank is, and write what torch has recorded into a file."""
    stack = frames.of_main_thread()
    threads = map(frames.of_thread, [*sys._current_frames().values()])
    answer: dict[str, Any] = {
        "at": frames.place(stack)[:500],
        "may_last": any(_DEBUGS.search(frame.f_code.co_filename) for frame, _ in stack)
        or any(_compiles(frame.f_code) for thread in threads for frame, _ in thread),
    }
    try:
        answer |= page.where()
    except Exception as error:  # what it asks may be ending; the rest is worth an answer
        log.debug("where the rank waits is not known: %r", error)
    recorded = answer.pop("recorded", None)
    page.tell(answer)
    if recorded and file is not None:
        with suppress(OSError):
            file.write_bytes(pickle.dumps(recorded))  # as torch's tool reads it


def _compiles(code: CodeType) -> bool:
    if code.co_filename.endswith("torch/_dynamo/convert_frame.py"):
        return True
    return code.co_name in _COMPILES and "torch/_inductor" in code.co_filename
