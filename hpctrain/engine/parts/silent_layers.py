"""Layers that no gradient reaches: in every step that is looked at, all of it is exactly zero.

every 5th step or so   the largest part of each parameter's gradient ── on the device
log step               the maximum over these steps and over all ranks ── layers of zeros

On the CPU the host knows at once which parameters were zero until now, and looks at these alone.
"""

import torch

from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.tensors import local
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part

_LEAST_EVERY, _LOOKS = 5, 8  # steps; looks between two reports
_ENOUGH = 4  # looks


class SilentLayers(Part):
    """Looks at the gradients of one run.

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
