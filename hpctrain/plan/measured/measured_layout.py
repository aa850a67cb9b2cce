"""The layout that a run had, as `plan` would predict it."""

from __future__ import annotations

import copy

from hpctrain.forecast.measured_run import MeasuredRun
from hpctrain.plan.layouts import Layout


def layout_of(run: MeasuredRun) -> Layout:
    """Return the layout of a run, on the ranks that it really had.

    Args:
        run: The run; torchrun may have given it other ranks than its section `launch`.
    """
    config = copy.deepcopy(run.config)
    config.launch.nodes, config.launch.tasks_per_node = run.nodes, run.ranks // run.nodes
    return Layout(config, run.nodes, (), named=True)
