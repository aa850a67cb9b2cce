"""What a run directory records of its run: `run.json`, `progress.json` and `hang.json`.

`hpctrain.runs.run_dir` writes run.json; `hpctrain.engine.parts.display` writes progress.json;
`hpctrain.engine.faults.observer` writes hang.json.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from hpctrain.base.errors import DamageError
from hpctrain.base.files.disk import is_own
from hpctrain.base.files.mailbox import Message
from hpctrain.base.files.record import (
    Count,
    Finite,
    JobId,
    Record,
    Seconds,
    Time,
    convert,
    matching,
    read,
)

log = logging.getLogger(__name__)

# Such a text becomes a part of a path, of a batch script, or an argument of squeue.
_Code = Annotated[str, matching("([0-9a-f]{16})?", "16 hexadecimal digits")]
Host = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "the name of a host")]
_User = Annotated[str, matching(r"([^-\s,=][^\s,=]*)?", "the name of a user")]
_LEAST_RATE = 1e-9  # steps a second; a clock that was set back makes it negative


class Submission(Record, frozen=True):
    """Where the scheduler knows a run: the path of the script and the number of the array task."""

    script: str = ""
    task: Count = 0
    user: _User = ""
    time: Time = 0.0
    pack: Annotated[int, Meta(ge=1, le=10**7)] = 1  # how many runs share the job


class BestValue(Record, frozen=True, kw_only=True):
    """The best value of a metric so far, and its step."""

    metric: str = ""
    value: Finite
    step: Count


class AttemptKey(NamedTuple):
    """Which start of a run this is: the ranks of one step of a job, after so many requeues."""

    job_id: str = ""
    restart_count: int = 0
    step_id: int = 0


class Keyed(Record, frozen=True):
    """A record of one attempt."""

    job_id: JobId = ""
    restart_count: Count = 0
    step_id: Count = 0

    @property
    def key(self) -> AttemptKey:
        """What tells the attempt from others of its run."""
        return AttemptKey(self.job_id, self.restart_count, self.step_id)


class AttemptRecord(Keyed, frozen=True):
    """One attempt at a run; the time of its start is 0 if it was not recorded."""

    started: Time = 0.0
    ended: Time | None = None
    seen: Time | None = None  # the last sign of life, which the next attempt has noted
    state: str = ""
    error: str = ""
    reason: str = ""
    step: Count | None = None
    first_step: Count | None = None  # of the newest checkpoint; when loaded, of the one it was
    damaged: tuple[Count, ...] = ()  # the steps of newer ones, from which it could not go on
    host: str = ""
    hosts: tuple[str, ...] = ()
    pid: Count = 0
    launcher: str = ""
    world_size: Annotated[int, Meta(ge=1, le=10**7)] = 1
    nodes: Annotated[int, Meta(ge=1, le=10**7)] = 1
    code: str = ""
    code_changed: str = ""
    misfit: bool = False
    # What `hpctrain.runs.state.verdict` has decided on the end, and why.
    cause: str = ""
    fingerprint: str = ""
    ended_at: Count | None = None  # the global step that was reached
    waste: str = ""  # what it has asked Slurm for and did not need
    verdict: str = ""
    avoid: tuple[Host, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)


class Hang(Keyed, Message, frozen=True, kw_only=True):
    """The content of hang.json: why the ranks of an attempt do not get on (`faults.observer`)."""

    BOX = "hang.json"

    sentence: str
    rank: Count
    host: str
    state: str  # one of those of `faults.process_state`
    time: Time = 0.0  # when it was named
    step: Count = 0  # the global steps that were made
    phase: str = ""
    at: str = ""  # the user's line: FILE:LINE in NAME
    seconds: float = 0.0  # since the last mark
    late: bool = False  # beyond its limit; else it is only late if others wait for it
    waits_in: str = ""  # a collective operation
    open: tuple[str, ...] = ()  # the groups whose operations it waits in
    # The number of the last operation that it has entered, by group.
    operations: dict[str, Count] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, run: Path, key: AttemptKey, since: float) -> Hang | None:
        """Return what the attempt with a key, begun at `since`, has left; None if nothing."""
        found = cls.get(run)
        return found if found and found.key == key and found.time >= since else None


class Note(Record, frozen=True):
    """What looked wrong with a run at a step: one note for each topic, such as `flat`."""

    topic: str
    text: str
    step: Count = 0
    about: str = ""  # such as a rank


class RunRecord(Record, frozen=True):
    """The content of run.json."""

    VERSION: ClassVar[int] = 1

    uid: str = ""
    signature: str = ""
    data_digest: str = ""
    state: str = ""
    attempts: tuple[AttemptRecord, ...] = ()
    submission: Submission | None = None
    result: dict[str, int | float] | None = None
    best: BestValue | None = None
    sweep: dict[str, str] | None = None
    swept: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    config_dir: str = ""  # that of the command, `--config-dir`
    code: _Code | None = None
    config_digests: tuple[str, ...] = ()  # what config.yaml may be
    provenance: str | None = None
    parent: dict[str, str | int | None] | None = None
    left_out: tuple[tuple[Count, Count], ...] = ()
    micro_batch_rows: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    lowered_in: tuple[str | int, ...] | None = None  # an AttemptKey
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        """Check the step of the result."""
        step = (self.result or {}).get("step", 0)
        if not isinstance(step, int) or not 0 <= step <= 2**53:
            raise ValueError("`result.step` must be a step, so a whole number from 0 on")

    @classmethod
    def of(cls, run: Path) -> RunRecord:
        """Return the content of run.json; one without a state if the file does not exist."""
        try:
            return read(cls, run / "run.json")
        except FileNotFoundError:
            return cls()

    def noted(self, topic: str = "") -> list[str]:
        """Return the notes on what looks wrong, all or those on a topic."""
        return [note.text for note in self.notes if topic in ("", note.topic)]

    @property
    def attempt(self) -> AttemptRecord:
        """The last attempt; an empty one when none has begun."""
        return self.attempts[-1] if self.attempts else AttemptRecord()

    @property
    def words(self) -> list[str]:
        """The words of the command that makes the run; none if its overrides are not known."""
        folder = ["--config-dir", self.config_dir] if self.config_dir else []
        return [*folder, *self.overrides] if self.overrides else []

    @property
    def submitted(self) -> float:
        """When the run was submitted last, in seconds since the epoch; 0 if never."""
        return self.submission.time if self.submission else 0.0

    @property
    def shares_job(self) -> bool:
        """Whether the run was submitted last in a job that it shares with others."""
        return self.submission is not None and self.submission.pack > 1

    @property
    def is_outside_slurm(self) -> bool:
        """Whether the run was started outside of Slurm since it was submitted last."""
        attempt = self.attempt
        return attempt.launcher not in ("", "slurm") and attempt.started > self.submitted

    @property
    def by_worker(self) -> bool:
        """Whether the last job was a worker's of a search, which trains one trial after another."""
        script = Path(self.submission.script if self.submission else "")
        return script.parent.parent.name == "workers"

    @property
    def paused_at(self) -> int | None:
        """The step at which a run that is paused was asked to."""
        return self.reached if self.state == "paused" else None

    @property
    def reached(self) -> int | None:
        """The last step of a run that has finished or is paused."""
        step = (self.result or {}).get("step")
        return None if step is None else int(step)


class ListedRun(Record, frozen=True):
    """A run in the list of its sweep, `sweep.json`; `run` is its directory."""

    run: str = ""
    name: str = ""
    state: str = ""
    job: JobId = ""
    swept: tuple[str, ...] = ()

    @classmethod
    def of(cls, sweep: Path) -> list[ListedRun]:
        """Return the runs of a sweep; the log tells which of them are damaged and left out.

        It raises a FileNotFoundError if the sweep has no list yet, and a DamageError if sweep.json
        is none.
        """
        file, found = sweep / "sweep.json", []
        for number, content in enumerate(read(tuple[Any, ...], file)):
            try:
                found.append(convert(cls, content, f"{file} $[{number}]"))
            except DamageError as error:
                log.warning("%s: this run of the sweep is left out", error)
        return found


def is_own_run(run: Path) -> bool:
    """Return whether this user owns a run directory, and the files that say what it runs."""
    return all(map(is_own, (run, run / "run.json", run / "config.yaml")))


class Progress(Record, frozen=True):
    """The content of progress.json, which rank 0 writes every few seconds."""

    VERSION: ClassVar[int] = 1

    step: Count | None = None
    max_steps: Count | None = None
    time: Time = 0.0
    stepped: Time = 0.0
    step_s: Seconds | None = None
    longest_step_s: Seconds = 0.0
    stop_s: Seconds = 0.0  # the longest step and the longest save, together
    doing: str = ""
    steps_per_s: Finite | None = None
    metric: str = ""
    better: str | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    best: BestValue | None = None

    @classmethod
    def of(cls, run: Path) -> Progress:
        """Return the content of progress.json; an empty one if there is none.

        The file is not synced, so a crash of the machine may leave half of it, which says nothing;
        a damaged value is a DamageError.
        """
        try:
            return read(cls, run / "progress.json")
        except FileNotFoundError:
            return cls()
        except DamageError as error:
            if error.at:
                raise
            return cls()

    @property
    def left_s(self) -> float | None:
        """The seconds to the last step at the present speed; None if that is not known."""
        if self.max_steps is None or self.steps_per_s is None or self.steps_per_s < _LEAST_RATE:
            return None
        return (self.max_steps - (self.step or 0)) / self.steps_per_s
