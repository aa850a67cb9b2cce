"""`python -m hpctrain evaluate RUN`: the metrics of a checkpoint, on any data and ranks."""

import argparse
import json
import logging
import sys
import time

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.names.step_names import step_of
from hpctrain.base.secrets import reference
from hpctrain.base.terminal.terminal import exact
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.commands import select
from hpctrain.results.loaded import LoadedRun
from hpctrain.runs import trust


def main(argv: list[str]) -> int:
    """Print the metrics, and keep them in the run directory."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain evaluate",
        description="Evaluate a checkpoint of a run as the training does: in this process, or with "
        "the ranks of torchrun or srun, in any layout. KEY=VALUE changes keys that do not change "
        "the result, such as parallel.tp=1.",
    )
    add_choice(parser)
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="keys that change")
    parser.add_argument("--split", metavar="NAME", help="the split (default: data.val_split)")
    parser.add_argument("--data", metavar="PATH", help="the data set (default: that of the run)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    trust.add_argument(parser)
    options = parser.parse_intermixed_args(argv)
    run, ranks = chosen_run(options), RankInfo.from_env()
    checkpoint = run.checkpoint(options.step, best=options.best)
    own = run.config.data
    split = options.split or (own.val_split if options.data else own.evaluated)
    means = run.evaluate(
        options.split,
        data=options.data,
        step=step_of(checkpoint),
        ema=options.ema,
        overrides=options.overrides,
    )
    if not ranks.is_main:
        return 0
    result = {
        "run": run.path.name,
        "step": step_of(checkpoint),
        "split": split,
        "data": reference(options.data or run.config.data.path),
        "metrics": means,
    }
    if options.json:
        print(json.dumps(result), file=exact())
    else:
        print(f"{run.path.name}, step {step_of(checkpoint)}, split {split}:")
        print("".join(f"  {name:<20} {value:.6g}\n" for name, value in means.items()), end="")
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    kept = run.path / "evaluations" / f"{checkpoint.name}-{split}-{stamp}.json"
    try:
        write_atomically(kept, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"{kept}: the result is not kept ({error.strerror})") from error
    return 0


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a run and the parameters of one of its checkpoints."""
    select.add_choice(parser)
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="take the moving average of the parameters (default: as the training's evaluation)",
    )


def chosen_run(options: argparse.Namespace) -> LoadedRun:
    """Return the run that a command line names."""
    if wrong := [text for text in options.overrides if "=" not in text]:
        raise ConfigError(f"{wrong[0]}: give one run, and KEY=VALUE for what changes")
    path = select.one_run(options.dir, options.run, "this command")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    return LoadedRun(path)
