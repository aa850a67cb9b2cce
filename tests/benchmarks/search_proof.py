"""Whether a search with rungs finds the best of a full grid, what it costs, and what chance does.

    python -m tests.benchmarks.search_proof FOLDER                   all tables; hours on two cores
    python -m tests.benchmarks.search_proof FOLDER --real digits     and a real search, on Slurm

First it trains the grids of 27 trials that FOLDER does not have yet: one for each data set and
training seed, in one process each. All trials report at every rung and none is pruned (eta=1).
Then the rule of promotion is replayed on these values, with workers whose clock is the number of
steps, in several random orders of the trials. `--real` runs a search on a Slurm cluster, on the
development cluster if there is none, and compares its values, result and cost with its replay.

The grids and the rules below were written before they were trained. The regret is how much worse
the last value of the found trial is than that of the best trial with the same seed. Random search
at the same cost trains as many trials as the cost is worth to their ends, and takes the best. Any
rule by rank promotes all trials up to the place of the best one: that is its cost "at least".
"""

import argparse
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean, stdev

from msgspec import structs
from scipy.stats import spearmanr

from hpctrain.run_record import RunRecord
from hpctrain.search.rule import Action, choose
from hpctrain.search.trials import Found, Trial
from hpctrain.tracking import journal
from tests import cluster

GRIDS = {
    "digits": (
        *("hydra.sweeper.rungs=[73,220]", "train.max_steps=660", "train.eval_every=660"),
        *("metric=val/loss", "optimizer.lr=1e-3,3e-3,1e-2"),
        *("model.hidden=[64,64],[128,128],[256,256]", "model.dropout=0.0,0.1,0.3"),
    ),
    "flow": (
        *("hydra.sweeper.rungs=[31,93]", "train.max_steps=280", "train.eval_every=280"),
        *("hooks=[]", "optimizer.lr=5e-4,2e-3,8e-3"),
        *("model.width=8,12,16", "model.modes=[4,4],[8,8],[12,12]"),
    ),
}
SAMPLES = {"digits": (), "flow": ("--size", "32", "--steps", "4")}
# By these metrics trials are promoted and judged. Of the accuracy, the share of errors is taken.
METRICS = {"digits": ("val/loss", "val/accuracy"), "flow": ("val/relative_l2",)}  # flow: the loss
# The first rung, counted from the shortest one; eta at each rung; min_reports.
RULES = [
    *((0, etas, 1) for etas in ((4, 4), (3, 3), (2, 2), (2, 4), (1.5, 3))),
    *((1, etas, 1) for etas in ((4,), (3,))),
    (0, (4, 4), 9),  # the only one that was written after the first results
]
TRIALS, SEEDS, ORDERS, WORKERS = 27, 5, 20, 4
T_95 = {3: 4.303, 4: 3.182, 5: 2.776}  # Student's t for so many seeds


def command(name: str, folder: Path, seed: int, *more: str) -> list[str]:
    """Return the command that trains the trials of a data set, in a folder for its runs."""
    data = folder / "data" / name
    return [
        *(sys.executable, "-m", "hpctrain", "-m", f"experiment={name}", f"data.path={data}"),
        *("hydra/sweeper=optuna", "hydra/sweeper/sampler=grid"),
        *(f"hydra.sweeper.n_trials={TRIALS}", "hydra.sweeper.direction=minimize"),
        *("tracking.upload=false", "monitor.enabled=false", "launch.snapshot=off"),
        *(*GRIDS[name], f"seed={seed}", *more),
    ]


def search_in(runs: Path) -> Found:
    """Return the only search in an output folder."""
    (file,) = runs.glob("sweeps/*/search.json")
    return Found.of(file.parent)


def train(name: str, folder: Path, seed: int) -> None:
    """Train the grid of a seed, unless that is done; a grid that was interrupted goes on."""
    runs = folder / name / f"grid-{seed}"
    if any(runs.glob("sweeps/*/search.json")) and search_in(runs).ended:
        return
    if not (data := folder / "data" / name).exists():
        make = [sys.executable, "-m", "data_prep", "sample", name, str(data), *SAMPLES[name]]
        subprocess.run(make, check=True)
    here = ("hydra/launcher=submitit_local", "hydra.sweeper.eta=1", "hydra.sweeper.n_jobs=1")
    subprocess.run([*command(name, folder, seed, *here), f"output_dir={runs}"], check=True)


@dataclass(frozen=True)
class Grid:
    """The trials of one seed, trained in full, as a metric sees them."""

    found: Found
    seconds: dict[str, dict[int, float]]  # of each run, up to the step of each rung

    @classmethod
    def of(cls, runs: Path, metric: str) -> "Grid":
        """Read the grid of an output folder. The study has the values of one metric only."""
        found = search_in(runs)
        trials = [
            replace(trial, values=_values(runs / trial.run, metric, found.rungs))
            for trial in found.at("finished")
        ]
        assert len(trials) == TRIALS, (runs, len(trials))
        spent = {trial.run: seconds(runs / trial.run, found.rungs) for trial in trials}
        return cls(structs.replace(found, trials=tuple(trials)), spent)

    @property
    def ranked(self) -> list[Trial]:
        """The trials, that with the best last value first."""
        step = self.found.rungs[-1]
        return sorted(self.found.trials, key=lambda trial: self.found.rank(trial, step))

    def at(self, step: int) -> dict[str, float]:
        """Return the values at a rung by what was searched."""
        return {config(trial): trial.values[step] for trial in self.found.trials}


def config(trial: Trial) -> str:
    """Return the searched values in a few words."""
    return " ".join(f"{key.rpartition('.')[2]}={trial.params[key]}" for key in sorted(trial.params))


def _values(run: Path, metric: str, rungs: Sequence[int]) -> dict[int, float]:
    bodies = [record.body for record in journal.read_all(journal.journal_path(run))]
    told = [body for body in bodies if metric in body.get("metrics", ())]
    seen = {body["step"]: body["metrics"][metric] for body in told}
    return {step: 1 - seen[step] if "accuracy" in metric else seen[step] for step in rungs}


def seconds(run: Path, rungs: Sequence[int]) -> dict[int, float]:
    """Return the measured seconds of a trial up to each rung, times its ranks."""
    spent = [
        (each.first_step, (each.ended - each.started) * each.world_size)
        for each in RunRecord.of(run).attempts
        if each.ended and each.first_step is not None
    ]
    return {step: sum(taken for first, taken in spent if first < step) for step in rungs}


def replay(grid: Found, order: Sequence[Trial], workers: int) -> Found:
    """Return the search at its end, if the trials of a full grid are asked for in this order."""
    rungs = grid.rungs
    now: dict[int, Trial] = {}
    found = structs.replace(grid, trials=(), ended="", widths=(1,) * len(rungs))
    free, clock = workers, 0
    busy: list[tuple[int, int]] = []  # the time of the end of a piece, and its trial
    while True:
        while free:
            found = structs.replace(found, trials=tuple(now[number] for number in sorted(now)))
            choice = choose(found, 1)
            if choice.action is Action.END:
                return found
            if choice.action is Action.WAIT:
                break
            number = len(now) if choice.trial is None else choice.trial.number
            steps = rungs[choice.goal - 1] - (rungs[choice.goal - 2] if choice.goal > 1 else 0)
            before = choice.trial.values if choice.trial else {}
            made = replace(order[number], number=number, state="training", goal=choice.goal)
            now[number] = replace(made, values=before, rung=choice.goal - 1)
            heappush(busy, (clock + steps, number))
            free -= 1
        clock, number = heappop(busy)
        free += 1
        trial = now[number]
        step = rungs[trial.goal - 1]
        values = {**trial.values, step: order[number].values[step]}
        state = "finished" if trial.goal == len(rungs) else "paused"
        now[number] = replace(trial, values=values, rung=trial.goal, state=state)


@dataclass(frozen=True)
class Result:
    """What one replay has found, and what it has cost."""

    found: bool  # a trial with the grid's best value
    regret: float
    again: float  # regret of the mean over all seeds of what was found
    steps: float  # share of the grid's
    seconds: float
    chance: float  # that a random search of as many steps finds a best trial
    random: float  # the expected regret of that


def results(grids: Sequence[Grid], rule: tuple[int, Sequence[float], int]) -> Iterator[Result]:
    """Yield the result of each seed and order."""
    first, etas, least = rule
    means, last = config_means(grids), grids[0].found.rungs[-1]
    for grid in grids:
        rungs = grid.found.rungs[first:]
        told = structs.replace(grid.found, rungs=rungs, etas=etas, min_reports=least)
        losses = [trial.values[last] for trial in grid.ranked]
        everything = sum(each[last] for each in grid.seconds.values())
        for number in range(ORDERS):
            order = random.Random(number).sample(grid.found.trials, TRIALS)
            end = replay(told, order, WORKERS)
            assert end.best is not None
            loss = end.best.values[last]
            taken = sum(grid.seconds[trial.run][trial.step] for trial in end.trials)
            trials = sum(trial.step for trial in end.trials) / last
            yield Result(
                found=loss == losses[0],
                regret=loss - losses[0],
                again=means[config(end.best)] - min(means.values()),
                steps=trials / TRIALS,
                seconds=taken / everything,
                chance=at_random(trials, [float(loss == losses[0]) for loss in losses]),
                random=at_random(trials, losses) - losses[0],
            )


def at_random(trials: float, ranked: Sequence[float]) -> float:
    """Return the expected best of so many trials, from what each is worth, the best first."""

    def whole(drawn: int) -> float:
        ways = [math.comb(left, drawn - 1) for left in reversed(range(len(ranked)))]
        return sum(each * worth for each, worth in zip(ways, ranked, strict=True)) / sum(ways)

    low = math.floor(trials)
    return (low + 1 - trials) * whole(low) + (trials - low) * whole(min(low + 1, len(ranked)))


def config_means(grids: Sequence[Grid]) -> dict[str, float]:
    """Return the mean of the last values over the seeds."""
    values = [grid.at(grid.found.rungs[-1]) for grid in grids]
    return {key: mean(each[key] for each in values) for key in values[0]}


def show_noise(grids: Sequence[Grid]) -> None:
    """Print whether the best trial is the same for all seeds, and which are as good as it."""
    *rungs, last = grids[0].found.rungs
    print("\n| Seed | The grid's best | Value | Lead | Place at each rung | By rank, at least |")
    print("| --- " * 6 + "|")
    for seed, grid in enumerate(grids):
        best, second, *_ = grid.ranked
        lead = second.values[last] - best.values[last]
        places = [1 + sorted(grid.at(step).values()).index(best.values[step]) for step in rungs]
        least, left = 0, [*grid.found.trials]
        for start, end in pairwise([0, *rungs, last]):
            least += (end - start) * len(left)
            left = [trial for trial in left if trial.values[end] <= best.values[end]]
        shown = f"{best.values[last]:.4f} | {lead:.4f} | {places} | {least / last / TRIALS:.0%}"
        print(f"| {seed} | {config(best)} | {shown} |")
    means, by_seed = config_means(grids), [grid.at(last) for grid in grids]
    first, *others = sorted(means, key=means.__getitem__)
    spread = {key: stdev(each[key] for each in by_seed) for key in means}
    print(f"\nSpread between the seeds: {mean(spread.values()):.4f} (mean of all configs).")
    print(f"Best mean: {first}: {means[first]:.4f} +- {spread[first]:.4f}")
    equals = 0
    for place, key in enumerate(others, 2):
        apart = [each[key] - each[first] for each in by_seed]
        half = T_95[len(apart)] * stdev(apart) / math.sqrt(len(apart))
        equals += mean(apart) <= half
        if place <= 5:
            print(f"{place:3} {key}: {means[key]:.4f}, worse by {mean(apart):.4f} +- {half:.4f}")
    print(f"{equals} of {len(others)} others cannot be told from it (95%, pairs of equal seeds).")
    columns = [[each[key] for key in means] for each in by_seed]
    told = mean(spearmanr(a, b).statistic for a, b in combinations(columns, 2))
    print(f"Rank correlation of the last values of two seeds: {told:.2f}.")
    for step in rungs:
        early = [[grid.at(step)[key] for key in means] for grid in grids]
        told = mean(spearmanr(a, b).statistic for a, b in zip(early, columns, strict=True))
        print(f"Rank correlation of the values at step {step} and the last ones: {told:.2f}.")


def show_results(grids: Sequence[Grid]) -> None:
    """Print the table of the rules."""
    heads = "| First rung | eta; reports | Best found | by seed | Regret: mean, most | over seeds "
    print(f"\n{heads}| Steps | At most 25% | Seconds | At random: best found, regret |")
    print("| --- " * 10 + "|")
    rungs = grids[0].found.rungs
    for first, etas, least in RULES:
        every = [*results(grids, (first, etas, least))]
        hits = [each.found for each in every]
        seeds = [sum(hits[at : at + ORDERS]) for at in range(0, len(hits), ORDERS)]
        steps, taken = [each.steps for each in every], [each.seconds for each in every]
        print(
            f"| {rungs[first]} of {rungs[-1]} | {', '.join(f'{eta:g}' for eta in etas)}; {least} "
            f"| {sum(hits)} of {len(hits)} | {', '.join(map(str, seeds))} "
            f"| {mean(r.regret for r in every):.4f}, {max(r.regret for r in every):.4f} "
            f"| {mean(r.again for r in every):.4f} "
            f"| {mean(steps):.0%} ({min(steps):.0%} to {max(steps):.0%}) "
            f"| {mean(share <= 0.25 for share in steps):.0%} "
            f"| {mean(taken):.0%} ({min(taken):.0%} to {max(taken):.0%}) "
            f"| {mean(r.chance for r in every):.0%}, {mean(r.random for r in every):.4f} |"
        )


def show_real(name: str, folder: Path, eta: int, workers: int) -> None:
    """Run a search on a Slurm cluster, with the first seed, and compare it with its replay."""
    if problem := cluster.problem():
        sys.exit(problem)
    runs = folder / name / f"real-{eta}"
    more = (f"hydra.sweeper.eta={eta}", f"hydra.sweeper.n_jobs={workers}", "launch.wait=true")
    subprocess.run([*command(name, folder, 0, *more), f"output_dir={runs}"], check=True)
    real = search_in(runs)
    grid = Grid.of(folder / name / "grid-0", real.metric)
    last, full = real.rungs[-1], {config(trial): trial for trial in grid.found.trials}
    order = [full[config(trial)] for trial in real.trials]
    told = replay(structs.replace(grid.found, etas=real.etas), order, workers)
    apart = [
        abs(value - there.values[step])
        for here, there in zip(real.trials, order, strict=True)
        for step, value in here.values.items()
    ]
    print(f"\n{name}, eta={eta}, {workers} workers on Slurm: {len(apart)} values at the rungs")
    print(f"largest difference from those of the grid: {max(apart):.2e}")
    for what, end in (("real", real), ("replay", told)):
        assert end.best is not None
        rank = [config(trial) for trial in grid.ranked].index(config(end.best)) + 1
        reached = [sum(step in trial.values for trial in end.trials) for step in end.rungs]
        steps = sum(trial.step for trial in end.trials) / (last * TRIALS)
        print(
            f"{what}: {reached} trials at the rungs, {steps:.1%} of the steps, "
            f"best {config(end.best)} {end.best.value:.5f}, number {rank} of the grid"
        )
    taken = sum(seconds(runs / trial.run, real.rungs)[last] for trial in real.trials)
    whole = sum(each[last] for each in grid.seconds.values())
    print(f"seconds of all ranks: {taken:.0f}, {taken / whole:.1%} of the grid's {whole:.0f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.search_proof")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", nargs="+", default=[], choices=GRIDS)
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    for name in GRIDS:
        for seed in range(SEEDS):
            train(name, folder, seed)
        places = [folder / name / f"grid-{seed}" for seed in range(SEEDS)]
        for metric in METRICS[name]:
            print(f"\n# {name}, {metric}")
            grids = [Grid.of(place, metric) for place in places]
            show_noise(grids)
            show_results(grids)
    for name in asked.real:
        show_real(name, folder, eta=4, workers=3)


if __name__ == "__main__":
    main()
