"""`python -m hpctrain predict RUN DATA OUT`: what a model says about each sample of a data set."""

import argparse
from pathlib import Path

from hpctrain.base.names.step_names import step_of
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.results.commands.evaluate import add_choice, chosen_run
from hpctrain.runs import trust


def main(argv: list[str]) -> int:
    """Write the predictions; print where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain predict",
        description="Write what the model of a run says about each sample of a data set, as HDF5 "
        "shards with an index, in the order of the samples: in this process, or with the ranks of "
        "torchrun or srun.",
    )
    add_choice(parser)
    parser.add_argument("data", metavar="DATA", help="the folder or URL of the data set")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="keys that change")
    parser.add_argument("--split", metavar="NAME", help="the split (default: data.val_split)")
    trust.add_argument(parser)
    options = parser.parse_intermixed_args(argv)
    run = chosen_run(options)
    step = step_of(run.checkpoint(options.step, best=options.best))
    folder = run.predict(
        options.data,
        options.out,
        options.split,
        step=step,
        ema=options.ema,
        overrides=options.overrides,
    )
    if RankInfo.from_env().is_main:
        print(f"{folder}: predictions of {run.path.name}, step {step}")
    return 0
