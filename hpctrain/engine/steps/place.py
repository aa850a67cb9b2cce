"""What a run has on this rank before its loop begins."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.sections import LoopSections
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.parts.clocks import Account
from hpctrain.engine.steps.stepping import Outcome
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.tracker import Tracker


@dataclass
class Place:
    """One rank of a run in its process group: who it is, where it writes, who may stop it.

    `began_from` is called with the step from which the run goes on, and the damaged ones. `outcome`
    says how its loop has ended.
    """

    config: LoopSections
    run: RunDir
    ranks: RankInfo
    device: torch.device
    tracker: Tracker
    stop: Stop
    account: Account
    began_from: Callable[[int, Collection[int]], None] = lambda step, damaged: None
    outcome: Outcome | None = None

    def record(self, **facts: Any) -> None:
        """Write facts into run.json, on rank 0."""
        if self.ranks.is_main:
            self.run.update(**facts)
