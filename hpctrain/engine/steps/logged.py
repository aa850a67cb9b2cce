"""What a loop of one's own tells its session: the numbers that it logs, and its end.

Sums and counts become means over steps and ranks:

session.log ── this rank's sums ── train/…: a report every train.log_every steps
                                ── others: with the step in which they were logged
each step      is one of them not finite? ── the reduction of the step ── health
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.base.errors import ConfigError
from hpctrain.config.metric_registry import EPOCH, RUNG
from hpctrain.engine.distributed import objects
from hpctrain.engine.faults.health import Health
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.reducing.scalars import Copied, Numbers
from hpctrain.engine.part import Part

Number = float | torch.Tensor
_NAME = re.compile(r"[A-Za-z][\w-]*(/[\w.@:-]+)+")
# What the session and the monitor write: groups, and single names.
_OURS = ("perf/", "best/", "lr/", "system/")
_WRITTEN = (EPOCH, RUNG)


class Logged(Part):
    """The sums of this rank since the last report."""

    name = "logged"

    def __init__(self, mesh: Mesh, health: Health) -> None:
        self._mesh, self._health = mesh, health
        self._sums: dict[str, torch.Tensor] = {}  # a sum and a count, in float64 on the device
        self._step: dict[str, torch.Tensor] = {}  # what was logged in this step
        self._now = False  # whether something was logged that belongs to this step alone
        self._totals = Copied()
        self._before: dict[str, torch.Tensor] = {}  # what was logged in the step before

    def add(self, metrics: Mapping[str, Number | tuple[Number, Number]]) -> None:
        """Add numbers, or pairs of a sum and a count, to those of this rank."""
        for name, value in metrics.items():
            if not _NAME.fullmatch(name) or name.startswith(_OURS) or name in _WRITTEN:
                raise ConfigError(
                    f"session.log: {name!r} is no name of a metric: it has a group and a name, "
                    "such as train/loss or val/accuracy, and not one of ours "
                    f"({', '.join(_OURS + _WRITTEN)})"
                )
            total, count = value if isinstance(value, tuple) else (value, 1.0)
            pair = torch.stack([self._number(name, total), self._number(name, count)])
            before = self._sums.get(name)
            self._sums[name] = pair if before is None else before + pair
            self._step[name] = pair
            self._now |= not name.startswith("train/")

    def _number(self, name: str, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            if value.numel() == 1:
                return value.detach().reshape(()).to(self._mesh.device, torch.float64)
        elif isinstance(value, int | float) or hasattr(value, "__float__"):
            # torch.tensor(number, device=...) would wait for a GPU.
            return torch.full((), float(value), dtype=torch.float64, device=self._mesh.device)
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(
            f"session.log: {name} is {given}; a metric is one number, or a pair of a sum and a "
            "count of all that it is the mean of"
        )

    def own(self) -> torch.Tensor:
        """Return the sum of what was logged in this step: it is not finite if one number is not."""
        if not self._step:
            return torch.zeros(1, dtype=torch.float64, device=self._mesh.device)
        return (torch.stack([*self._step.values()]) * 0.0).sum().reshape(1)

    def judge(self, own: torch.Tensor, total: Numbers) -> None:
        """Let health judge this step, by the sum over all ranks of what `own` returned."""
        one = torch.ones((), dtype=torch.float64, device=self._mesh.device)
        # The numbers of a GPU are judged a step late.
        logged = [*self._before.items(), *self._step.items()]
        self._before, self._step = self._step, {}
        self._health.names = lambda: [name for name, pair in logged if not pair.isfinite().all()]
        self._health.accepts(total[0], None, own[0], one)

    def flags(self) -> list[float]:
        """Return whether a metric of this rank belongs to this step alone."""
        return [float(self._now)]

    def offer(self, totals: Numbers) -> None:
        """Take how many ranks have such a metric."""
        self._totals.offer(totals)

    def wants_report(self) -> bool:
        """Return whether a metric belongs to this step alone."""
        every = self._mesh.degrees.ranks
        for (ranks,), _ in self._totals.take(late=True):
            if 0 < ranks < every:
                raise ConfigError(
                    f"session.log: {ranks:.0f} of {every} ranks have logged metrics outside of "
                    "train/ in a step: all ranks log the same names in the same steps, also those "
                    "whose numbers are nothing to add, as a pair (0, 0)"
                )
        return self._now

    def report(self) -> dict[str, float]:
        """Return the means over all steps since the last report, and over all ranks."""
        self._now = False
        sums, self._sums = self._sums, {}
        names = objects.all_gather([*sums])
        for rank, others in enumerate(names):
            if {*others} != {*sums}:
                differ = sorted({*others} ^ {*names[0]})
                raise ConfigError(
                    f"session.log: rank {rank} has logged {', '.join(others) or 'nothing'} since "
                    f"the last report, and rank 0 {', '.join(names[0]) or 'nothing'}: all ranks "
                    f"log the same names in the same steps ({', '.join(differ)} differ)"
                )
        if not sums:
            return {}
        together = torch.stack([sums[name] for name in names[0]])
        self._mesh.add(together)
        pairs = zip(names[0], together.tolist(), strict=True)
        return {name: total / count if count else float("nan") for name, (total, count) in pairs}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of each rank; all ranks call it together."""
        own = {name: pair.tolist() for name, pair in self._sums.items()}
        return {"ranks": objects.all_gather(own)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; on other ranks, from the sums of all."""
        ranks = state.get("ranks", [])
        same = len(ranks) == self._mesh.degrees.ranks
        mine: dict[str, list[float]] = {}
        if same:
            mine = ranks[torch.distributed.get_rank()]
        elif ranks:
            first = torch.distributed.get_rank() == 0
            for name in ranks[0]:
                both = zip(*(own[name] for own in ranks), strict=True)
                mine[name] = [sum(each) if first else 0.0 for each in both]
        self._sums = {
            name: torch.tensor(pair, dtype=torch.float64, device=self._mesh.device)
            for name, pair in mine.items()
        }


class Ending(Part):
    """Ends the run once a rank has asked for it, and keeps why."""

    name = "ending"

    def __init__(self) -> None:
        self._asked = self._reason = ""
        self._totals = Copied()

    def ask(self, reason: str) -> None:
        """End the run after this step."""
        self._asked = reason or "the loop has ended the run"

    def flags(self) -> list[float]:
        """Return whether this rank has asked."""
        return [float(bool(self._asked))]

    def offer(self, totals: Numbers) -> None:
        """Take how many ranks have asked."""
        self._totals.offer(totals)

    @property
    def over(self) -> str:
        """Why the run ends; "" as long as nobody has asked."""
        for (ranks,), _ in self._totals.take(late=True):
            if ranks and not self._reason:
                self._reason = self._asked or "the loop of another rank has ended the run"
        return self._reason

    def state_dict(self) -> str:
        """Return why the run has ended."""
        return self._reason

    def load_state_dict(self, state: str | Mapping[str, str]) -> None:
        """Go on from what `state_dict` returned."""
        self._reason = state if isinstance(state, str) else ""
