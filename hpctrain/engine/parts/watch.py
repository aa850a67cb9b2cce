"""Watches a run whose numbers are finite for what says that it learns nothing, or no longer.

    each step     its mean loss, which `hpctrain.engine.faults.health` has read
    log step      losses ── diverged? ── layers without a gradient ── a note, or an error
                                                                      (train.watch=stop)

every 5th step or so   the largest part of each parameter's gradient ── on the device
log step               the maximum over these steps and over all ranks ── layers of zeros

All ranks see the same numbers, and decide alike. Nothing is said that a healthy run may show by
chance, for a wrong note does more harm than a missing one.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.tensors import local
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.parts.notes import Notes
from hpctrain.errors import HealthError

_LEAST_STEPS, _SOON = 100, 20  # before layers are judged; those that a divergence is read from
_DIVERGED = 3.0  # times the loss of the first step
_LEAST_EVERY, _LOOKS = 5, 8  # steps; looks between two reports
_ENOUGH = 4  # looks


class SilentLayers(Part):
    """Looks for layers that no gradient reaches: all of it is exactly zero in each step looked at.

    On the CPU the host knows at once which parameters were zero so far, and looks at these alone.
    `layers` is the number of those that had a gradient at the last `read`.
    """

    def __init__(self, model: ParallelModel, report_every: int) -> None:
        self._model = model
        self._every = max(_LEAST_EVERY, report_every // _LOOKS)
        self._most: torch.Tensor | None = None
        self._found: set[int] = set()  # the places of those that are not zero, as the host knows
        self._names: list[str] = []
        self._looks = self.layers = 0

    def after_backward(self) -> None:
        """Look at a step after its backward pass, if that is due; the host does not wait."""
        model = self._model
        if (model.step + 1) % self._every:
            return
        self._looks += 1  # on all ranks, also on one that has no part of a gradient
        if len(self._found) < len(model.parameters):
            self._look()

    def _look(self) -> None:
        model, here = self._model, {}
        for place, parameter in enumerate(model.parameters):
            if place not in self._found and (gradient := parameter.grad) is not None:
                own = local(gradient)
                if own.numel() and not own.is_sparse:
                    here[place] = own.detach()
        if not here:
            return
        # The norm of small numbers would be zero, as they are squared.
        norms = dict(zip(here, torch._foreach_norm([*here.values()], float("inf")), strict=True))
        # Offload leaves undivided parameters on the GPU, and their gradients.
        none = torch.full((), -1.0, device=model.mesh.device)
        places = range(len(model.parameters))
        found = torch.stack([norms[n].to(none) if n in norms else none for n in places])
        self._most = found if self._most is None else torch.maximum(self._most, found)
        if found.is_cpu:
            self._found |= {n for n, most in enumerate(found.tolist()) if not most <= 0}  # or a NaN

    def read(self) -> list[str] | None:
        """Return the layers of zeros since the last call, on all ranks; None after few looks."""
        if self._looks < _ENOUGH:
            return None
        model = self._model
        self._names = self._names or _names_of_all_stages(model)
        every = torch.full((len(self._names),), -1.0, device=model.mesh.device)
        if self._most is not None:
            every[[self._names.index(name) for name in model.names]] = self._most.to(every)
        self._most, self._looks = None, 0
        self._found.clear()
        layers: dict[str, float] = {}
        for name, most in zip(self._names, model.mesh.largest(every), strict=True):
            layer = name.rpartition(".")[0] or name
            layers[layer] = max(layers.get(layer, -1.0), most)  # a NaN is no zero
        layers = {name: most for name, most in layers.items() if most != -1.0}
        self.layers = len(layers)
        return [name for name, most in layers.items() if most == 0]


def _names_of_all_stages(model: ParallelModel) -> list[str]:
    """Return the names of the parameters of all stages, in their order."""
    if model.mesh.degrees.pp == 1:
        return model.names
    stages = objects.all_gather(model.names, model.mesh.pp_group)
    return list(dict.fromkeys(name for names in stages for name in names))


class Watch(Part):
    """Watches one run, and says in `notes` what it finds; the policy is the key `train.watch`.

    Layers are not judged before the step `after`; `silent` looks at their gradients.
    """

    name = "watch"

    def __init__(
        self,
        notes: Notes,
        policy: str,
        *,
        max_steps: int,
        after: int = 0,
        silent: SilentLayers | None = None,
    ) -> None:
        self._notes, self._policy, self._max_steps = notes, policy, max_steps
        self._after, self._first = max(after, _LEAST_STEPS), math.nan
        self._recent: deque[float] = deque(maxlen=_SOON)
        self._silent: set[str] = set()
        self._diverged, self._layers = False, silent

    def seen(self, step: int, loss: float) -> None:
        """Take the mean loss of a step."""
        if math.isnan(self._first):
            self._first = loss
        self._recent.append(loss)

    def ends(self, step: int) -> None:
        """Let the run end at this step, before `max_steps`, with what is judged next."""
        self._max_steps = min(step, self._max_steps)

    def reported(self, step: int) -> None:
        """Judge the steps since the last report."""
        if self._layers is None:
            self.judge(step, None, 0)
        else:
            self.judge(step, self._layers.read(), self._layers.layers)

    def judge(self, step: int, silent: Sequence[str] | None, layers: int) -> None:
        """Judge the steps until now; all ranks call this together.

        `silent` are those of the `layers` whose gradient was zero in all steps that were looked at
        since the last time; None if too few were. What is wrong is a HealthError if `train.watch`
        is stop.
        """
        if not self._recent:
            return
        last = sorted(self._recent)
        now, tenth = statistics.median(last), len(last) // 10
        # A few batches without an error have a loss of 0, so nine of ten must be low again, too.
        decides = last[-1 - tenth] if self._diverged else last[tenth]
        self._diverged = len(last) == _SOON and 0 < _DIVERGED * self._first < decides
        text = (
            f"train/loss has diverged: it is {now:.4g} at step {step}, and was {self._first:.4g} "
            "in the first step. Take a smaller optimizer.lr, a longer warm-up, or train.clip_norm"
        )
        self._say("diverged", text * self._diverged)
        if silent is not None:
            self._judge_layers({*silent}, step, layers)

    def _judge_layers(self, silent: set[str], step: int, layers: int) -> None:
        dead = silent & self._silent if self._silent or step < self._max_steps else silent
        self._silent = silent
        if step < self._after or self._recent[-1] == 0:  # a loss of 0 has no gradient
            return
        names = ", ".join(sorted(dead)[:3]) + (" and others" if len(dead) > 3 else "")
        text = (
            f"no gradient reaches {len(dead)} of {layers} layers ({names}): it is exactly zero at "
            f"step {step}, so they learn nothing. Units behind them may be dead (ReLU, a mask, a "
            "detach): take a smaller optimizer.lr or other initial weights"
        )
        self._say("layers", text * bool(dead), " ".join(sorted(dead)))

    def _say(self, topic: str, text: str, about: str = "") -> None:
        self._notes.say(topic, text, about)
        if text and self._policy == "stop" and self._notes.step < self._max_steps:
            raise HealthError(f"{text}. The run stops because of train.watch=stop")

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the steps, as JSON."""
        if math.isnan(self._first):  # JSON has no NaN
            return {}
        # train.watch=stop ends a run by these, so an attempt that was killed must not change them.
        known = {"first": self._first, "recent": [*self._recent], "silent": sorted(self._silent)}
        return known | {"diverged": self._diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; older checkpoints have less, or more."""
        self._first = state.get("first", math.nan)
        self._recent.extend(state.get("recent", ()))
        self._silent = {*state.get("silent", ())}
        self._diverged = state.get("diverged", False)
