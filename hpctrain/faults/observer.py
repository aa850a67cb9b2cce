"""The observer: a process that sees whether the ranks of a node get on, until they end.

    the pages of the ranks (`hpctrain.marks`), /proc ── twice a second ── a rank is dead, or late
    a rank is late ── SIGUSR1 to the ranks of the node ── RUN/logs/observed/rankN.stacks
    observer of a node      ── RUN/logs/observed/nodeN.json, every few seconds
    observer of node rank 0 ── reads them, and names the cause: the log of rank 0, RUN/hang.json

A rank that waits in a collective operation is not the cause, as long as another one does not. A
node whose observer writes nothing any more is a cause, too. Nothing is ended here: under Slurm the
batch script does that, and elsewhere `parallel.timeout_s` ends the run.

It does not import torch. It gets no signal of the job, and ends with the last rank of its node.
"""

import logging
import math
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import json
from msgspec.structs import replace

from hpctrain import frames, marks
from hpctrain.disk import write_atomically
from hpctrain.errors import DamageError
from hpctrain.faults import process_state as states
from hpctrain.faults.limits import Limits
from hpctrain.record import Count, Record, Seconds, read, written
from hpctrain.run_record import AttemptKey, Hang
from hpctrain.secrets import mask
from hpctrain.terminal import few
from hpctrain.tracking.uploader_process import Process, begin_child

log = logging.getLogger(__name__)
FOLDER = "observed"  # in the folder of the logs
_LOOK_S = 0.5
_SILENT_S = 3.0  # a thread that gives a sign twice a second
_ASK_BEFORE_S, _ASK_AGAIN_S = 1.0, 2.0
_STACKS_S = 0.3  # until a rank has written its stacks
_STOPPED_S = 5.0  # a look that is late by this: this process was stopped, too, so nothing is known
_SAVE_S = 30.0
_SLOW_S = 60.0  # in a phase without a limit, before a line says where a rank is
_MOST = 0.9  # of parallel.timeout_s: then others wait in vain, whatever the limit is
_NODES_A_SECOND = 200  # whose files the first node reads


class Place(Record, frozen=True):
    """Where the page of a rank is."""

    rank: Count
    pid: Count
    started: Count
    descriptor: Count


class Job(Record, frozen=True):
    """What an observer must know of its job; `ranks` are all, `here` are those of its node."""

    key: AttemptKey
    node_rank: int
    nodes: int
    ranks: int
    here: int
    host: str
    floor_s: Seconds
    times: float
    timeout_s: Seconds
    log_file: str  # that of rank 0 in a terminal; "" if what is printed goes into one


class Report(Record, frozen=True):
    """A rank that does not get on."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    seconds: float  # since its last mark
    state: str
    hangs: bool  # beyond its limit; else it is only late if others wait for it
    slow: bool  # no limit is known, and nobody waits for too long
    at: str
    waits_in: str
    entered: int  # collective operations
    data: tuple[str, ...]
    computes: bool


class _Node(Record, frozen=True):
    """What an observer writes of its node."""

    key: AttemptKey
    beat: int
    host: str
    ranks: tuple[int, ...]
    ended: int  # ranks
    reports: tuple[Report, ...]


class _Rank:
    """A rank of this node."""

    def __init__(self, place: Place) -> None:
        self.place, self.process = place, Process("", place.pid, place.started)
        self._file = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR)
        self.page = marks.Page(self._file)
        self._samples: deque[states.Sample | None] = deque(maxlen=5)
        self._left = [self.page.stay(phase)[0] for phase in range(len(marks.PHASES))]
        self._stacks = marks.SIZE  # up to where they are known
        self._late_since = -1.0  # the last mark of a rank that is late

    @property
    def has_ended(self) -> bool:
        """Whether the rank ends, or is dead."""
        return bool(self.page.marks().left) or (bool(self._samples) and self._samples[-1] is None)

    def learn(self, limits: Limits) -> None:
        """Take over how long the rank was in the phases that it has left since the last call."""
        for phase, known in enumerate(self._left):
            count, seconds = self.page.stay(phase)
            if count != known:
                self._left[phase] = count
                limits.learn(self.place.rank, phase, seconds)

    def report(self, job: Job, since: float, limits: Limits) -> Report | None:
        """Look at the rank; return a report if it is dead, late or slow, at least since `since`."""
        marked, now = self.page.marks(), time.monotonic()
        self._samples.append(states.look(self.process))
        if marked.left:
            return None
        rank, phase = self.place.rank, int(marked.phase)
        late_s, late = now - max(marked.at, since), marked.at == self._late_since
        any_time = marked.long_work or phase == marks.END
        limit = None if any_time else limits.limit(rank, phase)
        most = math.inf if any_time or job.ranks == 1 else _MOST * job.timeout_s
        interesting = min(_SLOW_S if limit is None else limit, most)
        soon = late or late_s > interesting - min(_ASK_BEFORE_S, interesting / 2)
        if soon and (marked.asked < marked.at or now - marked.asked > _ASK_AGAIN_S):
            self.page.ask()
        answer, silent = self.page.answer(), now - max(marked.alive, since) > _SILENT_S
        state = states.state_of(self._samples, silent, answer)
        if state == states.STOPPED:
            limit = limits.floor_s(phase)
        elif answer.get("may_last"):
            return None
        # What is late stays late until the next mark: the limit may be forgotten meanwhile.
        late = late or (limit is not None and late_s > limit)
        if state is None or not (state == states.DEAD or late or late_s > interesting):
            return None
        self._late_since = marked.at if late else self._late_since
        return Report(
            rank=rank,
            host=job.host,
            pid=self.place.pid,
            step=int(marked.step),
            phase=marks.PHASES[phase],
            seconds=late_s,
            state=state,
            hangs=late,
            slow=state != states.DEAD and not late and late_s <= most,
            at=str(answer.get("at", "")) if state != states.DEAD else "",
            waits_in=str(answer.get("waits_in", "")),
            entered=int(answer.get("entered", 0)),
            data=tuple(answer.get("data", ())),
            computes=sum(s is not None and s.state == "R" for s in self._samples) > 2,
        )

    def write_stacks(self) -> None:
        """Ask the rank for the stacks of its threads, also one that holds Python's lock."""
        with suppress(ProcessLookupError):
            if not self.has_ended:
                os.kill(self.place.pid, signal.SIGUSR1)

    def new_stacks(self) -> str:
        """Return the stacks that were written since the last call; "" if there are none."""
        size = os.fstat(self._file).st_size
        text = os.pread(self._file, size - self._stacks, self._stacks)
        self._stacks = size
        return text.decode(errors="replace")


class _Observer:
    """The observer of one node."""

    def __init__(self, run: Path, job: Job) -> None:
        self._run, self._job, self._folder = run, job, run / "logs" / FOLDER
        limits = self._folder / "limits.json"
        self._limits = Limits(limits, job.floor_s, job.times, job.timeout_s)
        self._ranks: dict[int, _Rank] = {}
        self._asked_stacks: set[int] = set()
        self._lines: dict[int, str] = {}  # of the code, by rank, from the stacks
        self._said: set[tuple[int, int, str]] = set()  # which slow ranks
        self._written, self._beat = 0.0, 0
        self._step, self._stepped = 0.0, 0.0  # the last step of a rank here, and when it was seen
        self._first: dict[int, _Node] = {}  # what was in the files of other nodes
        self._seen: dict[int, tuple[_Node, float]] = {}  # what is new in them, and since when
        self._named: Hang | None = None
        self._input = True

    def run(self) -> None:
        """Look until the last rank of this node has ended."""
        looked = since = saved = time.monotonic()
        read_at = 0.0
        while True:
            self._wait()
            now = time.monotonic()
            if now - looked > _STOPPED_S:
                since = now
                self._seen = {number: (node, now) for number, (node, _) in self._seen.items()}
            looked = now
            self._find_ranks()
            reports = self._look(since)
            ended = sum(rank.has_ended for rank in self._ranks.values())
            everybody = len(self._ranks) == self._job.here or not self._input
            over = ended == len(self._ranks) and everybody
            self._write(reports, now, ended)
            if self._job.node_rank == 0:
                if over or now - read_at > self._job.nodes / _NODES_A_SECOND:
                    self._read_nodes(now)
                    self._judge(now)
                    read_at = now
                if over or now - saved > _SAVE_S:
                    self._limits.save()
                    saved = now
            if over:
                return

    def _wait(self) -> None:
        """Wait for the next look, or until the rank that has started this process has ended."""
        if not self._input:
            time.sleep(_LOOK_S)
        elif select.select([sys.stdin], [], [], _LOOK_S)[0]:
            self._input = bool(os.read(sys.stdin.fileno(), 64))

    def _find_ranks(self) -> None:
        for number in {*range(self._job.here)} - self._ranks.keys():
            with suppress(OSError, DamageError):
                file = self._folder / f"node{self._job.node_rank}.{number}"
                place = read(Place, file, parts=3)
                # The file may be of an attempt before.
                if states.look(Process("", place.pid, place.started)) is not None:
                    self._ranks[number] = _Rank(place)

    def _look(self, since: float) -> tuple[Report, ...]:
        """Return the ranks that are dead or late."""
        reports = []
        step = max((rank.page.marks().step for rank in self._ranks.values()), default=0.0)
        if step != self._step:
            self._step, self._stepped = step, time.monotonic()
        for rank in self._ranks.values():
            rank.learn(self._limits)
            if report := rank.report(self._job, since, self._limits):
                reports.append(report)
        late = {report.rank for report in reports if report.state != states.DEAD}
        if late - self._asked_stacks:
            for rank in self._ranks.values():
                rank.write_stacks()
            time.sleep(_STACKS_S)
        self._asked_stacks = late
        for rank in self._ranks.values():
            number = rank.place.rank
            if stacks := rank.new_stacks():
                self._lines[number] = frames.place_in(stacks)
                with suppress(OSError):
                    (self._folder / f"rank{number}.stacks").write_text(mask(stacks))
        found = [
            replace(each, at=each.at or self._lines.get(each.rank, ""))
            if each.rank in late
            else each
            for each in reports
        ]
        for report in found:
            if report.slow and (key := (report.rank, report.step, report.phase)) not in self._said:
                self._said.add(key)
                log.warning("%s", _sentence(report, [report], []))
        return tuple(report for report in found if not report.slow)

    def _write(self, reports: tuple[Report, ...], now: float, ended: int) -> None:
        """Write the file of this node: every few seconds, and when there is something to say."""
        known = self._seen.get(self._job.node_rank, (None, 0.0))[0]
        said = [(report.rank, report.state) for report in reports]
        same = known and (known.ended, [(r.rank, r.state) for r in known.reports]) == (ended, said)
        if same and now - self._written < self._job.floor_s / 6:
            return
        self._written, self._beat = now, self._beat + 1
        numbers = tuple(sorted(rank.place.rank for rank in self._ranks.values()))
        key, host = self._job.key, self._job.host
        node = _Node(
            key=key, beat=self._beat, host=host, ranks=numbers, ended=ended, reports=reports
        )
        self._seen[self._job.node_rank] = node, now
        if self._job.nodes > 1:
            with suppress(OSError):
                file = self._folder / f"node{self._job.node_rank}.json"
                write_atomically(file, json.encode(node).decode(), sync=False)

    def _read_nodes(self, now: float) -> None:
        for number in {*range(self._job.nodes)} - {self._job.node_rank}:
            with suppress(OSError, DamageError):
                node = read(_Node, self._folder / f"node{number}.json", parts=3)
                # The first one may be of an attempt before.
                if node != self._first.setdefault(number, node) and node.key == self._job.key:
                    before, _ = self._seen.get(number, (None, 0.0))
                    if node != before:
                        self._seen[number] = node, now

    def _judge(self, now: float) -> None:
        """Name the rank because of which the others do not get on, once."""
        reports = [report for node, _ in self._seen.values() for report in node.reports]
        silent = [
            (now - seen, node)
            for node, seen in self._seen.values()
            # A step needs all ranks: a node whose file alone does not come is not lost.
            if node.ended < len(node.ranks) and now - max(seen, self._stepped) > self._job.floor_s
        ]
        if self._named is not None:
            ended = sum(node.ended for node, _ in self._seen.values())
            if not (reports or ended or self._named.state == states.SILENT):
                log.warning("rank %d gets on again", self._named.rank)
                (self._run / "hang.json").unlink(missing_ok=True)
                self._named = None
            return
        waiting = [report for report in reports if report.state == states.COLLECTIVE]
        causes = [
            report
            for report in reports
            if report.state == states.DEAD
            or (report.state != states.COLLECTIVE and (report.hangs or waiting))
        ]
        if silent and not causes:
            seconds, node = max(silent, key=lambda each: each[0])
            sentence = (
                f"{_named(node.ranks)} ({node.host}): the node has given no sign of life for "
                f"{seconds:.0f} s"
            )
            self._record(sentence, node.ranks[0], node.host, states.SILENT)
        elif causes:
            dead = [report for report in causes if report.state == states.DEAD]
            cause = min(dead or causes, key=lambda report: (report.step, report.rank))
            self._name(cause, _sentence(cause, causes, waiting))
        elif len(waiting) == self._job.ranks:
            cause = min(waiting, key=lambda report: (report.entered, report.rank))
            self._name(cause, _sentence(cause, [cause], waiting))

    def _name(self, cause: Report, sentence: str) -> None:
        more: dict[str, Any] = {"step": cause.step, "phase": cause.phase, "at": cause.at}
        late_s = 0.0 if cause.state == states.DEAD else cause.seconds
        self._limits.died(marks.PHASES.index(cause.phase), late_s)
        self._record(sentence, cause.rank, cause.host, cause.state, **more)

    def _record(self, sentence: str, rank: int, host: str, state: str, **more: Any) -> None:
        self._named = Hang(
            **self._job.key._asdict(),
            sentence=mask(sentence),
            rank=rank,
            host=host,
            state=state,
            time=time.time(),
            **more,
        )
        with suppress(OSError):
            write_atomically(self._run / "hang.json", written(self._named), sync=False)
        log.error("%s", sentence)


def _sentence(cause: Report, causes: Iterable[Report], waiting: list[Report]) -> str:
    """Return what is known of a rank that does not get on, and of those that do not with it."""
    text = f"rank {cause.rank} ({cause.host}, pid {cause.pid})"
    if cause.state == states.DEAD:
        text += f" has died after step {cause.step}, in the phase {cause.phase}"
    else:
        verb = "does not get on" if cause.slow else "hangs"
        text += f" {verb} after step {cause.step}, for {cause.seconds:.0f} s in the phase "
        text += f"{cause.phase}: it {states.WORDS[cause.state]}"
        if cause.state == states.HOLDS_LOCK:
            text += ", and computes" if cause.computes else ", and sleeps"
        if cause.waits_in:
            text += f" in {cause.waits_in}"
        if cause.at:
            text += f", at {cause.at}"
        text += "".join(f"; {each}" for each in cause.data)
    if more := [each.rank for each in causes if each is not cause]:
        text += f"; so {'does' if len(more) == 1 else 'do'} {_named(more)}"
    if others := [each for each in waiting if each is not cause]:
        verb = "waits" if len(others) == 1 else "wait"
        text += f"; {_named([each.rank for each in others])} {verb} in {others[0].waits_in}"
    return text


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {few(numbers, 8)}"


def main(argv: list[str]) -> int:
    """Observe the ranks of this node for the run and the job in `argv`."""
    run, job = Path(argv[0]), json.decode(argv[1], type=Job)
    begin_child()
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if job.log_file:
        with suppress(OSError):
            file = logging.FileHandler(job.log_file, delay=True)
            file.setFormatter(logging.getLogger().handlers[0].formatter)
            logging.getLogger().addHandler(file)
    try:
        _Observer(run, job).run()
    except Exception:
        log.exception("the observer failed: the run goes on, and nobody names a rank that hangs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
