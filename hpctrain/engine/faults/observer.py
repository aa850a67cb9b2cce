"""The observer: a process that sees whether the ranks of a node get on, until they end.

    the pages of the ranks (`marks`), /proc ── twice a second ── a rank is dead, or late
    a rank is late ── SIGUSR1 to the ranks of the node ── RUN/logs/observed/rankN.stacks
    observer of a node      ── RUN/logs/observed/nodeN.json, every few seconds
    observer of node rank 0 ── reads them, and names the cause: the log of rank 0, RUN/hang.json

A rank that waits in a collective operation is not the cause, as long as another one does not. If
all do, it is the one that has not entered an operation in which others wait, or else no rank. A
node whose observer writes nothing any more is a cause, too. Nothing is ended here: under Slurm the
batch script does that, and elsewhere `parallel.timeout_s` ends the run.

It does not import torch. It gets no signal of the job, and ends with the last rank of its node.
"""

import logging
import os
import select
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from msgspec import json
from msgspec.structs import replace

from hpctrain.base.files.mailbox import Message
from hpctrain.base.names.run_record import AttemptKey, Hang
from hpctrain.base.processes import child, marks
from hpctrain.base.processes.child import Process
from hpctrain.base.secrets import mask
from hpctrain.base.terminal.terminal import few
from hpctrain.engine.faults import process_state as states
from hpctrain.engine.faults.limits import Limits
from hpctrain.engine.faults.process_state import ObservedRank, ObserverSettings, PagePlace

log = logging.getLogger(__name__)
FOLDER = "observed"  # in the folder of the logs
_LOOK_S = 0.5
_STACKS_S = 0.3  # until a rank has written its stacks
_STOPPED_S = 5.0  # a look that is late by this: this process was stopped, too, so nothing is known
_SAVE_S = 30.0
_NODES_A_SECOND = 200  # whose files the first node reads


class _Node(Message, frozen=True):
    """What an observer writes of its node."""

    BOX = "logs/observed/node*.json"

    key: AttemptKey
    beat: int
    host: str
    ranks: tuple[int, ...]
    ended: int  # ranks
    hangs: tuple[Hang, ...]  # that are dead or late


class _Observer:
    """The observer of one node."""

    def __init__(self, run: Path, job: ObserverSettings) -> None:
        self._run, self._job, self._folder = run, job, run / "logs" / FOLDER
        self._place, self._host = job.ranks, socket.gethostname()
        limits = self._folder / "limits.json"
        self._limits = Limits(limits, job.floor_s, job.timeout_s)
        self._ranks: dict[int, ObservedRank] = {}  # by local rank
        self._asked_stacks: set[int] = set()
        self._said: set[tuple[int, int, str]] = set()  # which slow ranks
        self._written, self._beat = 0.0, 0
        self._step, self._stepped = 0.0, 0.0  # the last step of a rank here, and when it was seen
        self._told: tuple[int, list[tuple[int, str]]] | None = None  # in the file of this node
        self._first: dict[int, _Node] = {}  # what was in the files of other nodes
        self._seen: dict[int, tuple[_Node, float]] = {}  # what is new in them, and since when
        self._named: Hang | None = None
        self._input = True

    def run(self) -> None:
        """Look until the last rank of this node has ended."""
        looked = since = saved = time.monotonic()
        read_at = 0.0
        while True:
            if not self._input:  # the rank that has started this process has ended
                time.sleep(_LOOK_S)
            elif select.select([sys.stdin], [], [], _LOOK_S)[0]:
                self._input = bool(os.read(sys.stdin.fileno(), 64))
            now = time.monotonic()
            if now - looked > _STOPPED_S:
                since = now
                self._seen = {number: (node, now) for number, (node, _) in self._seen.items()}
            looked = now
            self._find_ranks()
            hangs = self._look(since)
            ended = sum(rank.has_ended for rank in self._ranks.values())
            everybody = len(self._ranks) == self._place.local_world_size or not self._input
            over = ended == len(self._ranks) and everybody
            self._write(hangs, now, ended)
            if self._place.node_rank == 0:
                if over or now - read_at > self._place.num_nodes / _NODES_A_SECOND:
                    self._read_nodes(now)
                    self._judge(now)
                    read_at = now
                if over or now - saved > _SAVE_S:
                    self._limits.save()
                    saved = now
            if over:
                return

    def _find_ranks(self) -> None:
        for number in {*range(self._place.local_world_size)} - self._ranks.keys():
            place = PagePlace.get(self._run, f"{self._place.node_rank}.{number}")
            # It may be of an attempt before.
            if place is None or not Process(self._host, place.pid, place.started).alive:
                continue
            with suppress(OSError):
                rank = ObservedRank(place, self._host)
                if rank.is_of_attempt:
                    self._ranks[number] = rank
                else:
                    rank.close()

    def _look(self, since: float) -> tuple[Hang, ...]:
        """Return the ranks that are dead or late; say which are slow."""
        step = max((rank.step for rank in self._ranks.values()), default=0.0)
        if step != self._step:
            self._step, self._stepped = step, time.monotonic()
        found = self._reports(since)
        late = {hang.rank for hang, _ in found if hang.state != states.DEAD}
        if late - self._asked_stacks:
            for rank in self._ranks.values():
                rank.ask_for_stacks()
            time.sleep(_STACKS_S)
            found = self._reports(since)
        self._asked_stacks = late
        for hang, slow in found:
            if slow and (key := (hang.rank, hang.step, hang.phase)) not in self._said:
                self._said.add(key)
                log.warning("%s", hang.sentence)
        return tuple(hang for hang, slow in found if not slow)

    def _reports(self, since: float) -> list[tuple[Hang, bool]]:
        for rank in self._ranks.values():
            rank.learn(self._limits)
            rank.keep_stacks(self._folder)
        found = (rank.report(self._job, since, self._limits) for rank in self._ranks.values())
        return [each for each in found if each]

    def _write(self, hangs: tuple[Hang, ...], now: float, ended: int) -> None:
        """Write the file of this node: every few seconds, and when there is something to say."""
        told = ended, [(each.rank, each.state) for each in hangs]
        if told == self._told and now - self._written < self._job.floor_s / 6:
            return
        own, self._told = self._place.node_rank, told
        self._written, self._beat = now, self._beat + 1
        node = _Node(
            key=self._place.attempt_key,
            beat=self._beat,
            host=self._host,
            ranks=tuple(sorted(rank.place.rank for rank in self._ranks.values())),
            ended=ended,
            hangs=hangs,
        )
        self._seen[own] = node, now
        if self._place.num_nodes > 1:
            with suppress(OSError):
                node.put(self._run, str(own))

    def _read_nodes(self, now: float) -> None:
        for number in {*range(self._place.num_nodes)} - {self._place.node_rank}:
            if (node := _Node.get(self._run, str(number))) is None:
                continue
            # The first one may be of an attempt before.
            first = self._first.setdefault(number, node)
            before = self._seen[number][0] if number in self._seen else first
            if node != before and node.key == self._place.attempt_key:
                self._seen[number] = node, now

    def _judge(self, now: float) -> None:
        """Name the rank because of which the others do not get on, once."""
        hangs = [hang for node, _ in self._seen.values() for hang in node.hangs]
        if self._named is not None:
            ended = sum(node.ended for node, _ in self._seen.values())
            if not (hangs or ended or self._named.state == states.SILENT):
                log.warning("rank %d gets on again: %s", self._named.rank, self._named.sentence)
                Hang.drop(self._run)
                self._named = None
            return
        silent = [
            (now - seen, node)
            for node, seen in self._seen.values()
            # A step needs all ranks: a node whose file alone does not come is not lost.
            if node.ended < len(node.ranks) and now - max(seen, self._stepped) > self._job.floor_s
        ]
        waiting = [each for each in hangs if each.state == states.COLLECTIVE]
        others = [each for each in hangs if each.state != states.COLLECTIVE]
        dead = [each for each in others if each.state == states.DEAD]
        late = [each for each in others if each.late or waiting or each in dead]
        if late:
            # One that sleeps may wait for one that is stopped, in a way that torch does not tell.
            stuck = [each for each in late if each.state in states.STUCK]
            cause = min(dead or stuck or late, key=lambda each: (each.step, each.rank))
            self._name(cause, [each for each in late if each is not cause], waiting)
        elif silent:
            seconds, node = max(silent, key=lambda each: each[0])
            text = f"{_named(node.ranks)} ({node.host}): the node has given no sign of life for "
            text += f"{seconds:.0f} s"
            key, rank = node.key._asdict(), node.ranks[0]
            self._record(Hang(**key, sentence=text, rank=rank, host=node.host, state=states.SILENT))
        elif len(waiting) == self._place.world_size:
            self._name_behind(waiting)

    def _name_behind(self, waiting: list[Hang]) -> None:
        """Name the rank that has not entered an operation in which others wait, or none."""
        waiting = sorted(waiting, key=lambda each: each.rank)
        last = dict[str, int]()  # of the operations in which somebody waits, by group
        for each in waiting:
            for group in each.open:
                last[group] = max(last.get(group, 0), each.operations.get(group, 0))
        behind = [
            each
            for each in waiting
            if any(number < last.get(group, 0) for group, number in each.operations.items())
        ]
        if behind:
            others = [each for each in waiting if each not in behind]
            self._name(behind[0], behind[1:], others)
            return
        first = waiting[0]
        ranks = {each.waits_in: each.rank for each in reversed(waiting)}
        places = [f"rank {rank} in {where}" for where, rank in reversed(ranks.items())]
        text = (
            "all ranks wait for each other, and none has entered fewer collective operations: a "
            "GPU, or the network between them, does not get on, or the operations are different "
            f"ones. After step {first.step}, for {first.seconds:.0f} s in the phase {first.phase}, "
            f"there wait {few(places, 3)}"
        )
        self._name(replace(first, sentence=text, host="", at=""), [], [])

    def _name(self, cause: Hang, late: list[Hang], waiting: list[Hang]) -> None:
        """Name a rank as the cause, for others that are late and those that wait."""
        text = cause.sentence
        if late:
            does = "does" if len(late) == 1 else "do"
            text += f"; so {does} {_named(each.rank for each in late)}"
        if waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            ranks = _named(each.rank for each in waiting)
            text += f"; {ranks} {verb} in {waiting[0].waits_in}"
        late_s = 0.0 if cause.state == states.DEAD else cause.seconds
        self._limits.died(marks.PHASES.index(cause.phase), late_s)
        self._record(replace(cause, sentence=text))

    def _record(self, hang: Hang) -> None:
        self._named = replace(hang, sentence=mask(hang.sentence), time=time.time())
        with suppress(OSError):
            self._named.put(self._run)
        log.error("%s", hang.sentence)


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {few(numbers, 8)}"


def main(argv: list[str]) -> int:
    """Observe the ranks of this node for the run and the job in `argv`."""
    run, job = Path(argv[0]), json.decode(argv[1], type=ObserverSettings)
    child.begin()
    try:
        _Observer(run, job).run()
    except Exception:
        log.exception("the observer failed: the run goes on, and nobody names a rank that hangs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
