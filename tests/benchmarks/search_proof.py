"""How much of a full grid a search with rungs trains, and whether it finds the grid's best trial.

    python -m hpctrain -m experiment=digits hydra/launcher=submitit_local GRID DIGITS
    python -m data_prep sample flow data/flow --size 32 --steps 4
    python -m hpctrain -m experiment=flow hydra/launcher=submitit_local GRID FLOW
    python -m tests.benchmarks.search_proof runs/sweeps/DATE --eta 4 3 --workers 4

GRID    hydra/sweeper=optuna hydra/sweeper/sampler=grid hydra.sweeper.n_trials=27
        hydra.sweeper.direction=minimize hydra.sweeper.eta=1 hydra.sweeper.n_jobs=1
DIGITS  hydra.sweeper.rungs=[73,220] train.max_steps=660 train.eval_every=660 metric=val/loss
        optimizer.lr=1e-3,3e-3,1e-2 'model.hidden=[64,64],[128,128],[256,256]'
        model.dropout=0.0,0.1,0.3
FLOW    hydra.sweeper.rungs=[31,93] train.max_steps=280 train.eval_every=280 hooks=[]
        optimizer.lr=5e-4,2e-3,8e-3 model.width=8,12,16 'model.modes=[4,4],[8,8],[12,12]'

The last rung is the length of the experiment. The grids were written here before they were trained.

With eta=1 every trial reports at every rung and none is pruned. The rule of promotion is then
replayed on these values, with workers whose clock is the number of steps, the trials in a random
order, and noise added to each value: its standard deviation is a share of the spread of the grid.
The best is found if the trial that wins has the grid's best last value. With `--real` the values
and the promotions of a real search are compared with those of the replay in its order of trials.
"""

import argparse
import heapq
import random
import statistics
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from hpctrain.search.rule import Action, choose
from hpctrain.search.trials import Found, Trial


def replay(grid: Found, order: list[Trial], workers: int) -> tuple[Found, int, float]:
    """Return the search at its end, the steps of all pieces, and the share of time of no worker."""
    rungs = grid.rungs
    now: dict[int, Trial] = {}
    found = structs.replace(
        grid, trials=(), ended="", widths=(1,) * len(rungs), n_trials=len(order)
    )
    free, clock, spent, idle = workers, 0, 0, 0
    busy: list[tuple[int, int]] = []  # the time of the end of a piece, and its trial
    while True:
        while free:
            found = structs.replace(found, trials=tuple(now[number] for number in sorted(now)))
            choice = choose(found, 1)
            if choice.action is Action.END:
                return found, spent, idle / max(1, clock * workers)
            if choice.action is Action.WAIT:
                break
            number = len(now) if choice.trial is None else choice.trial.number
            steps = rungs[choice.goal - 1] - (rungs[choice.goal - 2] if choice.goal > 1 else 0)
            before = choice.trial.values if choice.trial else {}
            made = replace(order[number], number=number, state="training", goal=choice.goal)
            now[number] = replace(made, values=before, rung=choice.goal - 1)
            heapq.heappush(busy, (clock + steps, number))
            free, spent = free - 1, spent + steps
        end, number = heapq.heappop(busy)
        clock, idle, free = end, idle + free * (end - clock), free + 1
        trial = now[number]
        step = rungs[trial.goal - 1]
        values = {**trial.values, step: order[number].values[step]}
        state = "finished" if trial.goal == len(rungs) else "paused"
        now[number] = replace(trial, values=values, rung=trial.goal, state=state)


def noisy(trial: Trial, deviation: float, draws: random.Random) -> Trial:
    """Return the trial with noise in all values but the last one, which decides."""
    *early, last = sorted(trial.values)
    values = {step: trial.values[step] + draws.gauss(0, deviation) for step in early}
    return replace(trial, values={**values, last: trial.values[last]})


def check(grid: Found, real: Found) -> None:
    """Raise an AssertionError unless a real search of one worker did what the replay does."""
    trials = {trial.run: trial for trial in grid.trials}
    order = [trials[trial.run] for trial in real.trials]
    told, _, _ = replay(replace(grid, etas=real.etas), order, 1)
    for here, there in zip(told.trials, real.trials, strict=True):
        assert (here.run, here.values) == (there.run, there.values), (here, there)
    assert told.best is not None
    print(f"the real search is the replay: {real.spent} steps, best {told.best.run}")


def main() -> None:
    """Print a line for each eta and noise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument(
        "--real", type=Path, help="a search of one worker, compared with its replay"
    )
    parser.add_argument("--eta", type=float, nargs="+", default=[4.0, 3.0])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    grid = Found.of(options.sweep)
    trials = grid.at("finished")
    last = grid.rungs[-1]
    ranked = sorted(trials, key=lambda trial: grid.rank(trial, last))
    values = [trial.values[last] for trial in ranked]
    print(f"{len(trials)} trials, rungs {grid.rungs}, the best {grid.metric}: {values[:5]}")
    for step in grid.rungs[:-1]:
        early = sorted(trials, key=lambda trial: grid.rank(trial, step)).index(ranked[0]) + 1
        print(f"at step {step} the best is number {early}")
    if options.real and (real := Found.of(options.real)):
        check(grid, real)
    for eta in options.eta:
        for noise in options.noise:
            told = structs.replace(grid, etas=(eta,) * (len(grid.rungs) - 1))
            ranks, shares, idle = [], [], []
            for seed in range(options.seeds):
                draws = random.Random(seed)
                order = draws.sample(trials, len(trials))
                order = [noisy(trial, noise * statistics.stdev(values), draws) for trial in order]
                end, spent, waited = replay(told, order, options.workers)
                assert end.best is not None
                ranks.append(values.index(end.best.value) + 1)
                shares.append(spent / (last * len(trials)))
                idle.append(waited)
            print(
                f"eta={eta:g} noise={noise:g}: best found {ranks.count(1)} of {options.seeds}, "
                f"ranks {ranks}, steps {min(shares):.1%} to {max(shares):.1%} of the grid, "
                f"idle {statistics.mean(idle):.1%}"
            )


if __name__ == "__main__":
    main()
