"""A rank as its observer sees it: what /proc tells, together with what the rank says itself.

    T                the thread is silent or not   stopped
    D                                              uninterruptible
    Z, or not there                                dead
    R or S           it is silent                  C code that holds Python's lock
    R                it answers                    busy
    S                it answers                    asleep: a sleep, a file, a lock

On the left is what /proc says of the main thread.
"""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.base.files.mailbox import Message
from hpctrain.base.files.record import Count, Record, Seconds
from hpctrain.base.names.run_record import Hang
from hpctrain.base.processes import frames, marks
from hpctrain.base.processes.child import Process
from hpctrain.base.secrets import mask
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.engine.faults.limits import Limits

DEAD, STOPPED, UNINTERRUPTIBLE = "dead", "stopped", "uninterruptible"
HOLDS_LOCK, BUSY, ASLEEP = "C code with the lock", "busy", "asleep"
NO_DATA, COLLECTIVE, SILENT = "no data", "in a collective", "silent"
STUCK = STOPPED, UNINTERRUPTIBLE, HOLDS_LOCK  # by the word of Linux, whatever the rank waits for
# How the states are told in a sentence, of "it".
_WORDS = {
    STOPPED: "is stopped (SIGSTOP, or a debugger)",
    UNINTERRUPTIBLE: "is uninterruptible (state D): it waits in the kernel for a file or a device, "
    "or its control group is frozen",
    HOLDS_LOCK: "is in C code that holds Python's lock",
    BUSY: "computes",
    ASLEEP: "sleeps, or waits for something",
    NO_DATA: "waits for data",
    COLLECTIVE: "waits for other ranks",
}
_SILENT_S = 3.0  # a thread that gives a sign twice a second
_ASK_BEFORE_S, _ASK_AGAIN_S = 1.0, 2.0
_SLOW_S = 60.0  # in a phase without a limit, before a line says where a rank is
_MOST = 0.9  # of parallel.timeout_s: then others wait in vain, whatever the limit is


class PagePlace(Message, frozen=True):
    """Where the page of a rank is."""

    BOX = "logs/observed/node*"

    rank: Count
    pid: Count
    started: Count
    descriptor: Count
    begun: Seconds = 0.0  # as its page says it; later ones are those of another attempt


class ObserverSettings(Record, frozen=True):
    """What an observer must know: the rank that has started it, and the key of the config."""

    ranks: RankInfo
    floor_s: Seconds
    timeout_s: Seconds


class ObservedRank:
    """A rank of this node, on host `host`."""

    def __init__(self, place: PagePlace, host: str) -> None:
        self.place, self._host = place, host
        self._process = Process(host, place.pid, place.started)
        self._file = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR)
        self._page = marks.Page(self._file)
        self._letters: deque[str] = deque(maxlen=5)
        self._left = [self._page.stay(phase)[0] for phase in range(len(marks.PHASES))]
        self._stacks, self._line = marks.SIZE, ""  # up to where they are known, the line in them
        self._late_since = -1.0  # the last mark of a rank that is late

    def close(self) -> None:
        """Close the page."""
        os.close(self._file)

    @property
    def has_ended(self) -> bool:
        """Whether the rank ends, or is dead, or trains another run."""
        return self._has_left or "" in [*self._letters][-1:]

    @property
    def _has_left(self) -> bool:
        return bool(self._page.marks().left) or not self.is_of_attempt

    @property
    def is_of_attempt(self) -> bool:
        """Whether what it marks is of the attempt that has told where its page is."""
        return self._page.marks().begun == self.place.begun

    @property
    def step(self) -> float:
        """The number of global steps that it has made."""
        return self._page.marks().step

    def learn(self, limits: Limits) -> None:
        """Take over how long the rank was in the phases that it has left since the last call."""
        for phase, known in enumerate(self._left):
            count, seconds = self._page.stay(phase)
            if count != known:
                self._left[phase] = count
                limits.learn(self.place.rank, phase, seconds)

    def report(
        self, job: ObserverSettings, since: float, limits: Limits
    ) -> tuple[Hang, bool] | None:
        """Look at the rank; return what is known if it is dead, late or slow, since `since`.

        The sentence is of this rank alone. True says that it is only slow: no limit is known, and
        nobody waits for too long.
        """
        marked, now = self._page.marks(), time.monotonic()
        self._letters.append(self._process.state)
        if self._has_left:
            return None
        phase, pid = int(marked.phase), self.place.pid
        late_s, late = now - max(marked.at, since), marked.at == self._late_since
        any_time = marked.long_work or phase == marks.END
        limit = None if any_time else limits.limit(self.place.rank, phase)
        most = math.inf if any_time or job.ranks.world_size == 1 else _MOST * job.timeout_s
        interesting = min(_SLOW_S if limit is None else limit, most)
        soon = late or late_s > interesting - min(_ASK_BEFORE_S, interesting / 2)
        if soon and (marked.asked < marked.at or now - marked.asked > _ASK_AGAIN_S):
            self._page.ask()
        answer, silent = self._page.answer(), now - max(marked.alive, since) > _SILENT_S
        state = state_of(self._letters, silent, answer)
        if state == STOPPED:
            limit = limits.floor_s(phase)
        elif answer.get("may_last"):
            return None
        # What is late stays late until the next mark: the limit may be forgotten meanwhile.
        late = late or (limit is not None and late_s > limit)
        if state is None or not (state == DEAD or late or late_s > interesting):
            return None
        self._late_since = marked.at if late else self._late_since
        slow = state != DEAD and not late and late_s <= most
        at, waits_in = "", str(answer.get("waits_in", ""))
        step, name = int(marked.step), marks.PHASES[phase]
        text = f"rank {self.place.rank} ({self._host}, pid {pid})"
        if state == DEAD:
            text += f" has died after step {step}, in the phase {name}"
        else:
            at = str(answer.get("at", "")) or self._line
            text += f" {'does not get on' if slow else 'hangs'} after step {step}, for "
            text += f"{late_s:.0f} s in the phase {name}: it {_WORDS[state]}"
            if state == HOLDS_LOCK:
                text += ", and computes" if self._letters.count("R") > 2 else ", and sleeps"
            text += f" in {waits_in}" * bool(waits_in) + f", at {at}" * bool(at)
            text += "".join(f"; {each}" for each in answer.get("data", ()))
        hang = Hang(
            **job.ranks.attempt_key._asdict(),
            sentence=text,
            rank=self.place.rank,
            host=self._host,
            state=state,
            step=step,
            phase=name,
            at=at,
            seconds=late_s,
            late=late,
            waits_in=waits_in,
            open=tuple(answer.get("open", ())),
            operations=answer.get("entered", {}),
        )
        return hang, slow

    def ask_for_stacks(self) -> None:
        """Let the rank write the stacks of its threads, also one that holds Python's lock."""
        with suppress(ProcessLookupError):
            if not self.has_ended:
                os.kill(self.place.pid, signal.SIGUSR1)

    def keep_stacks(self, folder: Path) -> None:
        """Write the stacks that are new since the last call into a file of the folder."""
        size = os.fstat(self._file).st_size
        if size > self._stacks:
            text = os.pread(self._file, size - self._stacks, self._stacks).decode(errors="replace")
            self._stacks, self._line = size, frames.place_in(text)
            with suppress(OSError):
                (folder / f"rank{self.place.rank}.stacks").write_text(mask(text))


def state_of(letters: Sequence[str], silent: bool, answer: Mapping[str, Any]) -> str | None:
    """Return the state of a rank from its last letters of /proc; None if it is not known yet.

    `silent` says that a thread of the rank gives no signs. `answer` is what it has answered to the
    question where the rank is; empty if it has not.
    """
    if not letters[-1]:
        return DEAD
    if letters[-1] in "Tt":
        return STOPPED
    if {*letters} == {"D"}:
        return UNINTERRUPTIBLE
    if silent:
        return HOLDS_LOCK
    if not answer:
        return None
    if answer.get("waits_in"):
        return COLLECTIVE
    if answer.get("data"):
        return NO_DATA
    if 2 * letters.count("R") > len(letters):
        return BUSY
    return ASLEEP
