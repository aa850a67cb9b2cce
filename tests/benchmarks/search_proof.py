"""How much of a full grid a search with rungs trains, and whether it finds the grid's best trial.

    python -m hpctrain -m experiment=digits hydra/sweeper=optuna hydra.sweeper.rungs=[20,60] \
        hydra.sweeper.eta=1 hydra.sweeper.n_trials=27 train.max_steps=180 ...      the full grid
    python -m tests.benchmarks.search_proof runs/sweeps/DATE --eta 3 4 --workers 4 --noise 0 0.01

With eta=1 every trial reports at every rung and none is pruned. The rule of promotion is then
replayed on these values, with workers whose clock is the number of steps, the trials in a random
order, and noise added to each value: its standard deviation is a share of the spread of the grid.
The best is found if the trial that wins has the grid's best last value.
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


def replay(grid: Found, order: list[Trial], workers: int) -> tuple[Trial, int, float]:
    """Return the trial that wins, the steps of all pieces, and the share of time of no worker."""
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
                assert found.best is not None
                return found.best, spent, idle / max(1, clock * workers)
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


def main() -> None:
    """Print a line for each eta and noise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--eta", type=float, nargs="+", default=[3.0, 4.0])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    grid = Found.of(options.sweep)
    trials = grid.at("finished")
    last = grid.rungs[-1]
    best = min(trials, key=lambda trial: grid.rank_at(trial, last))
    spread = statistics.stdev(trial.values[last] for trial in trials)
    print(f"{len(trials)} trials, rungs {grid.rungs}, best {grid.metric}={best.values[last]:.6g}")
    for eta in options.eta:
        for noise in options.noise:
            told = structs.replace(grid, etas=(eta,) * (len(grid.rungs) - 1))
            shares, idle, ranks, values, hits = [], [], [], [], 0
            for seed in range(options.seeds):
                draws = random.Random(seed)
                order = draws.sample(trials, len(trials))
                order = [noisy(trial, noise * spread, draws) for trial in order]
                won, spent, waited = replay(told, order, options.workers)
                value = won.values[last]
                better = sum(grid.rank_at(t, last)[0] < told.rank(won)[0] for t in trials)
                hits += value == best.values[last]
                values.append(value)
                shares.append(spent / (last * len(trials)))
                idle.append(waited)
                ranks.append(better + 1)
            print(
                f"eta={eta:g} noise={noise:g}: best found {hits} of {options.seeds}, rank of the "
                f"winner {ranks}, its mean {grid.metric} "
                f"{statistics.mean(values):.4g}, "
                f"steps {min(shares):.1%} to {max(shares):.1%} of the grid, "
                f"idle {statistics.mean(idle):.1%}"
            )


if __name__ == "__main__":
    main()
