"""`launch.budget_gpu_hours`: what the jobs of a sweep or of a search may take together.

    a measured run, plan, or the limit ── Share of each run ──┐
    sacct, or what the runs have counted ── spent ────────────┴── Standing ── submission, `status`
                                                                     └── workers of a search

The folder of the sweep has it in `budget.json`. One GPU for one hour is a GPU-hour; runs without
GPUs count their ranks, in rank-hours.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from msgspec.structs import replace

from hpctrain.config.frozen import load
from hpctrain.config.schema import Config
from hpctrain.disk import text_of, write_atomically
from hpctrain.estimates import like_runs, time_limit
from hpctrain.estimates.planned_hours import planned_hours
from hpctrain.lock import file_lock, patience
from hpctrain.record import Count, Finite, JobId, Record, Time, read_known, written
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.facts import Facts, gather
from hpctrain.runs.state.state import UNDER_WAY, State, eta_s, judge
from hpctrain.slurm.allocations import allocations

log = logging.getLogger(__name__)
_FILE = "budget.json"
WORDS = {
    "": "like no measured run, so with their time limit",
    "planned": "like no measured run, so as `plan` foresees them",
}
_MARGIN = 1.3  # `plan` foresees the steps, without start-up, evaluations and checkpoints
_LOCK_S = 120.0  # a worker reads run directories and calls sacct while it holds the lock


class Share(Record, frozen=True):
    """What one run is foreseen to take. A device is a GPU, or a rank of a run without GPUs."""

    hours: Finite  # from its first step to its last, times the devices
    devices: Finite  # that it has; a part of a GPU with launch.gpus_per_run
    per_node: Finite  # devices of a node of its job, which several runs may share
    per_rank: Finite  # devices of a rank
    steps: Count = 0  # to its last one; 0 if unknown
    foreseen: Literal["", "measured", "planned"] = ""  # as a run like it; else by its time limit

    @classmethod
    def of(cls, config: Config, planned_h: float | None = None) -> Share:
        """Return the share of a valid config; a job with a range of nodes may get all of them.

        `planned_h` are the hours that `plan` foresees, for a run that is like no measured one.
        """
        launch, found = config.launch, time_limit.expected(config)
        per_node = launch.gpus_per_run or launch.gpus_per_node or launch.tasks_per_node
        devices = (launch.node_numbers[0 if found else -1] + launch.spares) * per_node
        hours = found.seconds / 3600 if found else launch.limit_min / 60
        if planned := planned_h is not None and not found:
            hours = min(hours, _MARGIN * planned_h)
        return cls(
            hours=hours * devices,
            devices=devices,
            per_node=launch.pack * per_node,
            per_rank=per_node / launch.tasks_per_node,
            steps=found.steps if found else config.train.max_steps or 0,
            foreseen="measured" if found else "planned" if planned else "",
        )


class Piece(Record, frozen=True):
    """What a worker of a search does now: it trains a trial up to a step, until about `end`."""

    devices: Finite
    end: Time
    run: str = ""
    until: int | None = None  # a step, or the last one


@dataclasses.dataclass(frozen=True)
class _Standing:
    """What has become of a budget, in its unit."""

    budget: Budget
    spent: float
    coming: float  # what the runs that run or wait will still take
    under_way: int  # these runs, or the pieces of a search
    unknown: int  # those of them that count with their time limit
    source: str  # of what was spent

    @property
    def left(self) -> float:
        """What may still be begun; below 0 if more was taken than was foreseen."""
        return self.budget.hours - self.spent - self.coming

    def __str__(self) -> str:
        parts = [f"{self.spent:.4g} spent ({self.source})"]
        if self.under_way:
            noun = "piece" if self.budget.search else "run"
            what = f"{self.under_way} {noun}{'s' * (self.under_way > 1)} under way"
            parts.append(f"{self.coming:.4g} still to come ({what})")
            if self.unknown:
                parts.append(f"{self.unknown} of them {WORDS['']}")
        parts.append(f"{self.left:.4g} left" if self.left >= 0 else f"{-self.left:.4g} too many")
        return f"budget of {self.budget.hours:g} {self.budget.unit}: {', '.join(parts)}"


class Budget(Record, frozen=True):
    """The content of budget.json."""

    VERSION: ClassVar[int] = 1

    hours: Finite  # launch.budget_gpu_hours
    gpus: bool = True  # whether the runs have GPUs
    search: bool = False  # its workers ask `may_begin`
    planned_h: Finite | None = None  # of a whole trial, as `plan` foresees it
    shares: dict[str, Share] = msgspec.field(default_factory=dict)  # by run directory
    jobs: tuple[JobId, ...] = ()  # arrays of earlier submissions
    pieces: dict[str, Piece] = msgspec.field(default_factory=dict)  # by the job of a worker

    @classmethod
    def of(cls, sweep: Path) -> Budget | None:
        """Return the budget of a sweep; None without one."""
        return read_known(cls, sweep / _FILE)

    @classmethod
    def planned(cls, configs: Mapping[Path, Config]) -> Budget | None:
        """Return that of runs to submit, with all of their earlier sweeps; None without one."""
        limits = [config.launch.budget_gpu_hours for config in configs.values()]
        known = [each for each in limits if each is not None]
        if not known:
            return None
        shares, jobs = dict[str, Share](), set[str]()
        for folder, before in _budgets_of(configs).items():
            shares |= before.shares
            jobs |= {*before.jobs, *_arrays(folder)}
        like_runs.forget()
        shares |= {str(path): Share.of(config) for path, config in configs.items()}
        others = {p: c for p, c in configs.items() if not shares[str(p)].foreseen}
        for path, hours in zip(others, planned_hours(others.values()), strict=True):
            shares[str(path)] = Share.of(others[path], hours)
        gpus = any(config.launch.gpus_per_node for config in configs.values())
        return cls(hours=min(known), gpus=gpus, shares=shares, jobs=tuple(sorted(jobs)))

    @property
    def unit(self) -> str:  # noqa: D102
        return "GPU-hours" if self.gpus else "rank-hours (no GPUs)"

    def write(self, sweep: Path) -> None:  # noqa: D102
        write_atomically(sweep / _FILE, written(self))

    def needs(self, run: Path, until: int | None = None) -> float:
        """Return what a run takes from its last checkpoint to a step, or to its last one."""
        share, done = self.shares[str(run)], RunDir(run).last_checkpoint()
        last = share.steps or Facts.read(run).progress.max_steps or 0
        return share.hours * max(0, min(until or last, last) - done) / last if last else share.hours

    def standing(self, sweep: Path, known: Iterable[tuple[Facts, State]] = ()) -> _Standing:
        """Return what has become of it; `known` are runs whose states are known already."""
        seen = {facts.path: (facts, state.name) for facts, state in known}
        others = [path for path in map(Path, self.shares) if path not in seen and path.exists()]
        now = time.time()
        found = [*map(Facts.read, others)] if self.search else gather(others)
        seen |= {one.path: (one, judge(one, now).name) for one in found}
        runs = [(*seen[Path(run)], s) for run, s in self.shares.items() if Path(run) in seen]
        spent, source = self._spent(sweep, [(facts, share) for facts, _, share in runs], now)
        going = [] if self.search else [each for each in runs if each[1] in UNDER_WAY]
        of = {str(path): facts for path, (facts, _) in seen.items()}
        coming = [self._to_come(each, of.get(each.run), now) for each in self.pieces.values()]
        for facts, state, share in going:
            left_s = eta_s(facts, now) if state == "running" else None
            by_speed = None if left_s is None else share.devices * left_s / 3600
            coming.append(self.needs(facts.path) if by_speed is None else by_speed)
        unknown = sum(not share.foreseen and state == "queued" for _, state, share in going)
        under_way = len(going) or sum(map(bool, coming))
        return _Standing(self, spent, sum(coming), under_way, unknown, source)

    def _to_come(self, piece: Piece, facts: Facts | None, now: float) -> float:
        """Return what a piece will still take: by its own speed, or else as it was foreseen.

        Beyond its end one that has not told its speed counts as if it began, while it trains.
        """
        if facts and RunDir(facts.path).is_locked():
            last = piece.until or facts.progress.max_steps
            left_s = eta_s(
                dataclasses.replace(facts, progress=replace(facts.progress, max_steps=last)), now
            )
            if left_s is not None:
                return piece.devices * max(0.0, left_s) / 3600
            if piece.end <= now:
                return self.needs(facts.path, piece.until)
        return piece.devices * max(0.0, piece.end - now) / 3600

    def _spent(self, sweep: Path, runs: list[tuple[Facts, Share]], now: float) -> tuple[float, str]:
        """Return what was taken, and who has counted it; several runs may have shared a job."""
        jobs = {facts.path: _jobs(facts) for facts, _ in runs}
        of = {job: share for facts, share in runs for job in jobs[facts.path]}
        booked = allocations({*of, *self.jobs, *_arrays(sweep)}) or {}
        most = max((share.per_node for share in self.shares.values()), default=1)
        hours = 0.0
        for job, times in booked.items():
            per_node = of[job].per_node if job in of else most
            for one in times:
                if one.start is not None:
                    devices = (self.gpus and one.gpus) or one.nodes * per_node
                    hours += devices * max(0.0, (one.end or now) - one.start) / 3600
        counted = sum(
            (facts.trained_s(None, all_ranks=True) or 0.0) * share.per_rank / 3600
            for facts, share in runs
            if booked.keys().isdisjoint(jobs[facts.path])
        )
        without = "counted by the runs, without Slurm's accounting"
        told = [name for name, some in (("booked by Slurm", hours), (without, counted)) if some]
        return hours + counted, " and ".join(told) or "nothing has run"


def _budgets_of(runs: Iterable[Path]) -> dict[Path, Budget]:
    """Return the budgets that runs belong to, by the folder of the sweep, the oldest first."""
    names = {str(run): run.parent / "sweeps" for run in runs}
    files = (file for place in {*names.values()} for file in place.glob(f"*/{_FILE}"))
    found = ((file.parent, Budget.of(file.parent)) for file in sorted(files))
    return {folder: each for folder, each in found if each and each.shares.keys() & names.keys()}


def standings(known: list[tuple[Facts, State]]) -> list[_Standing]:
    """Return the budgets of the sweeps to which runs belong; of a run in several, the newest."""
    told, covered = [], set[str]()
    for folder, budget in reversed(_budgets_of(facts.path for facts, _ in known).items()):
        if not budget.shares.keys() <= covered:
            covered |= budget.shares.keys()
            told.append(budget.standing(folder, known))
    return told


def of_search(sweep: Path, config: Config) -> None:
    """Write the budget of a search, or a new one if the same command has changed it."""
    hours, gpus = config.launch.budget_gpu_hours, config.launch.gpus_per_node > 0
    if hours is None:
        (sweep / _FILE).unlink(missing_ok=True)
        return
    if (before := Budget.of(sweep)) is None:
        before = Budget(hours=hours, gpus=gpus, search=True, planned_h=planned_hours([config])[0])
    replace(before, hours=hours).write(sweep)


def may_begin(
    sweep: Path, run: Path, until: int | None, worker: str
) -> Literal["yes", "later", "never"]:
    """Return whether a worker of a search may train a trial to a step, or to the last one (None).

    A worker, which has a name of its own, does one piece at a time: what it did before has ended.
    Later: it would not end within the budget, unless others take less than was foreseen.
    """
    if Budget.of(sweep) is None:
        return "yes"
    try:
        with file_lock(sweep / f".{_FILE}.lock", patience(_LOCK_S, str(sweep / _FILE), nap=0.2)):
            if (budget := Budget.of(sweep)) is None:  # another command has just removed it
                return "yes"
            like_runs.forget()
            share = Share.of(load(run / "config.yaml"), budget.planned_h)
            pieces = {job: piece for job, piece in budget.pieces.items() if job != worker}
            budget = replace(budget, shares={**budget.shares, str(run): share}, pieces=pieces)
            standing, hours = budget.standing(sweep), budget.needs(run, until)
            fits = hours <= standing.left
            if fits:
                end = time.time() + 3600 * hours / share.devices
                pieces[worker] = Piece(share.devices, end, str(run), until)
            budget.write(sweep)
            return "yes" if fits else "later" if standing.coming else "never"
    except TimeoutError as error:  # many workers ask, or sacct is slow
        log.warning("%s; asking again", error)
        return "later"


def _jobs(facts: Facts) -> list[str]:
    return facts.jobs


def _arrays(sweep: Path) -> set[str]:
    """Return the ids of the arrays that were submitted from the folder of a sweep."""
    files = (*sweep.glob("*/job_id"), *sweep.glob("*/*/job_id"))
    return {word for file in files for word in text_of(file).split() if word.isdecimal()}
