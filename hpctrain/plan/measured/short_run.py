"""The short training that measures a layout: its config, which is that of the run with few steps.

5 steps that start everything ── a report ── 20 steps in 4 reports, which count ── the end

It makes no evaluation and no checkpoint, tells nobody, and its metrics stay in its journal. A
learning rate that rises over all steps keeps the numbers finite, and takes no time.
"""

import copy
import math
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.schema import Config
from hpctrain.estimates.measured_run import ENOUGH_STEPS
from hpctrain.plan.predicting.estimate import Estimate

MOST = 3  # layouts that are measured on each number of ranks
_REPORT = 5
STEPS = _REPORT + ENOUGH_STEPS
_START_S, _SLOWER = 600.0, 3.0  # what the time limit allows beside the predicted time


def chosen(estimates: Sequence[Estimate]) -> list[list[Estimate]]:
    """Return the layouts to measure: the first three of each number of nodes and ranks.

    Those of one number are one list, because the jobs of an array have the same resources.
    """
    found: dict[tuple[int, int], list[Estimate]] = {}
    for estimate in estimates:
        if estimate.fits is not False:
            size = estimate.layout.nodes, estimate.layout.ranks
            found.setdefault(size, []).append(estimate)
    return [group[:MOST] for group in found.values()]


def short_run(estimate: Estimate, folder: Path, minutes: int) -> Config:
    """Return the config of the training that measures a layout."""
    config, nothing = copy.deepcopy(estimate.layout.config), Config()
    config.output_dir, config.metric, config.scaling = str(folder), "train/loss", None
    data, train, checkpoint = config.data, config.train, config.checkpoint
    data.val_split, data.val_splits, data.val_sets, data.fold = None, [], [], None
    data.group = None if data.subset is None else data.group
    config.evaluation, config.notify = nothing.evaluation, nothing.notify
    config.scheduler = nothing.scheduler
    config.scheduler.kind, config.scheduler.warmup_steps = "constant", STEPS
    train.max_steps, train.max_epochs, train.log_every = STEPS, None, _REPORT
    train.batch_size_ramp, train.eval_every, train.eval_every_s = [], None, None
    train.early_stopping, train.sample_prompt = nothing.train.early_stopping, None
    train.histograms_every = train.profile = None
    checkpoint.best, checkpoint.keep_every, checkpoint.at_end = None, None, False
    checkpoint.every_steps = STEPS + 1
    tracking = config.tracking
    tracking.enabled, tracking.upload, tracking.required = True, False, False
    tracking.also, tracking.log_model = [], False
    launch = config.launch
    launch.nodes, launch.wait, launch.rerun = estimate.layout.nodes, False, nothing.launch.rerun
    launch.time_min = minutes
    return config


def minutes(estimates: Sequence[Estimate]) -> int:
    """Return a time limit that lets the jobs start soon; never more than that of the run."""
    launch = estimates[0].layout.config.launch
    times = [estimate.time for estimate in estimates]
    slowest = max(math.inf if time is None else time.step_s for time in times)
    if slowest == math.inf:
        return launch.limit_min
    seconds = _START_S + _SLOWER * STEPS * slowest + launch.warn_s
    return min(launch.limit_min, math.ceil(seconds / 60))
