"""A rank lets its node's observer see whether it gets on.

every rank             ── its page (`hpctrain.marks`), and RUN/logs/observed/nodeN.LOCAL_RANK, which
                          tells where that is
rank with local_rank 0 ── starts the observer (`hpctrain.faults.observer`)
a thread               ── gives a sign of life, and answers where the main thread is
"""

import logging
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpctrain import frames, marks
from hpctrain.config.schema import HangConfig
from hpctrain.disk import write_atomically
from hpctrain.errors import LateRankError
from hpctrain.faults.observer import FOLDER, Job, Place
from hpctrain.record import written
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.run_record import Hang
from hpctrain.tracking.uploader_process import Process, start_child

log = logging.getLogger(__name__)
_BEAT_S, _END_S = 0.5, 2.0
_MOST_OBSERVERS = 10  # of an attempt: where they are always killed, no more are started
# While torch compiles, or somebody debugs, nobody knows how long it takes.
_MAY_LAST = re.compile(r"torch/_dynamo/convert_frame\.py|/(pdb|bdb)\.py$")
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
    rank = _Rank(page, config, logs, ranks, timeout_s)
    if ranks.is_main:
        (logs.parent / "hang.json").unlink(missing_ok=True)  # of an attempt before
    rank.start()
    try:
        yield
    finally:
        marks.leave()
        rank.end()


@contextmanager
def named_if_late(run: Path, ranks: RankInfo, timeout_s: float) -> Iterator[None]:
    """Replace the error of a collective operation that has timed out by what the observers say.

    Raises:
        LateRankError: A collective operation has timed out, after `parallel.timeout_s`.
    """
    began = time.time()
    try:
        yield
    except RuntimeError as error:
        if not _TIMED_OUT.search(str(error)):
            raise
        hang = Hang.of(run, ranks.attempt_key, began)
        said = hang.sentence if hang else f"rank {ranks.rank} waits for others ({error})"
        raise LateRankError(
            f"{said} (parallel.timeout_s={timeout_s:g}; stacks of the ranks: {run}/logs/{FOLDER})"
        ) from error


class _Rank:
    """This rank, and the observer that it has started, if any."""

    def __init__(
        self, page: marks.OwnPage, config: HangConfig, logs: Path, ranks: RankInfo, timeout_s: float
    ) -> None:
        self._page, self._config, self._ranks = page, config, ranks
        self._logs, self._timeout_s = logs, timeout_s
        self._observer: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hpctrain-marks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(_END_S)  # it may write to a file system that hangs
        if self._observer is not None:
            assert self._observer.stdin is not None
            with suppress(OSError):
                self._observer.stdin.close()
            # The observer of several ranks ends with the last of them.
            with suppress(subprocess.TimeoutExpired):
                self._observer.wait(_END_S if self._ranks.local_world_size == 1 else 0)

    def _beat(self) -> None:
        answering, known = threading.Thread(), False
        while True:
            self._page.is_alive()
            known = (known and not self._was_killed()) or self._make_known()
            marked = self._page.marks()
            if marked.asked > marked.answered and not answering.is_alive():
                answering = threading.Thread(target=self._answer, daemon=True)
                answering.start()
            if self._over.wait(_BEAT_S):
                return

    def _was_killed(self) -> bool:
        """Return whether another observer must begin: else the node would be taken for silent."""
        observer = self._observer
        if observer is None or (observer.poll() or 0) >= 0 or self._started == _MOST_OBSERVERS:
            return False
        log.warning(
            "the observer of this node was killed (%s): another one begins", observer.poll()
        )
        return True

    def _make_known(self) -> bool:
        """Tell where the page is, and start the observer, once rank 0 has made the folder."""
        ranks, folder = self._ranks, self._logs / FOLDER
        me = Process.current()
        place = Place(ranks.rank, me.pid, me.started, self._page.descriptor)
        try:
            if not self._logs.is_dir():
                return False
            folder.mkdir(exist_ok=True)
            file = folder / f"node{ranks.node_rank}.{ranks.local_rank}"
            write_atomically(file, written(place), sync=False)
            if ranks.local_rank == 0:
                self._started += 1
                self._observer = start_child(
                    *(
                        "hpctrain.faults.observer",
                        str(self._logs.parent.absolute()),
                        written(self._job()),
                    ),
                    cwd=self._logs.parent,
                    log_file=None,
                )
        except OSError as error:
            log.warning("nobody watches whether the ranks of this node get on: %s", error)
        return True

    def _job(self) -> Job:
        ranks, floor_s = self._ranks, self._config.floor_s or 0.0
        files = [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
        return Job(
            key=ranks.attempt_key,
            node_rank=ranks.node_rank,
            nodes=ranks.num_nodes,
            ranks=ranks.world_size,
            here=ranks.local_world_size,
            host=socket.gethostname(),
            floor_s=floor_s,
            times=self._config.times,
            timeout_s=self._timeout_s,
            log_file=files[0].baseFilename if files else "",
        )

    def _answer(self) -> None:
        stack = frames.of_main_thread()
        codes = [frame.f_code for frame in stack]
        answer: dict[str, Any] = {
            "at": frames.place(stack)[:500],
            "lock_is_free": _lock_is_free(),
            "may_last": any(
                _MAY_LAST.search(code.co_filename)
                or (code.co_name in _COMPILES and "torch/_inductor" in code.co_filename)
                for code in codes
            ),
        }
        try:
            answer |= self._page.where()
        except Exception as error:  # what it asks may be ending; the rest is worth an answer
            log.debug("where the rank waits is not known: %r", error)
        self._page.tell(answer)


def _lock_is_free() -> bool:
    """Return whether no thread executes Python: then its lock can be had at once.

    A thread that executes Python gives the lock away only after `sys.getswitchinterval()`.
    """
    waited = []
    for _ in range(11):
        asked = time.monotonic()
        time.sleep(0.0001)
        waited.append(time.monotonic() - asked)
    return statistics.median(waited) < sys.getswitchinterval() / 2
