"""What an optimizer must keep to, asked without a step of it.

An optimizer that takes a norm or a sum over a parameter gets the one of a rank's part where ranks
divide it: `DTensor.norm().item()` is that in torch, without a word. So only those that compute each
element by itself are taken there. What an optimizer keeps in attributes, where no checkpoint finds
it, is asked after the first steps (`hpctrain.engine.looking`).
"""

import inspect
from contextlib import suppress

import torch

from hpctrain.config.rules.parameter_rules import NEEDS_CLOSURE
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.errors import ConfigError

# By package. The steps of torch's Muon are those of DTensors, whose norms are of whole parameters.
_ELEMENTWISE = {
    "torch": {
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam"),
        *("RMSprop", "SGD"),
    },
    "schedulefree": {"AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"},
    "lion_pytorch": {"Lion"},
}
_DIVIDED = ("dp_shard", "tp", "pp", "ep")


def check_optimizer(target: str, optimizer: torch.optim.Optimizer, model: ParallelModel) -> None:
    """Refuse what would train another model than one process, or could not go on after a kill."""
    key, kind = f"optimizer._target_={target}", type(optimizer)
    with suppress(TypeError, ValueError):  # some compiled functions have no signature
        taken = inspect.signature(optimizer.step).parameters.values()
        if any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in taken):
            raise ConfigError(f"{key} {NEEDS_CLOSURE}")
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state:
            raise ConfigError(
                f"{key}: its attribute {name} is an optimizer with a state of its own, which no "
                "checkpoint has: it must keep in its own state[parameter] and param_groups what a "
                "resumed run needs"
            )
    if layout := [f"{name}={size}" for name, size in model.layout.items() if name in _DIVIDED]:
        _check_elementwise(key, kind, layout)


def _check_elementwise(key: str, kind: type, layout: list[str]) -> None:
    package = kind.__module__.partition(".")[0]
    known = kind.__name__ in _ELEMENTWISE.get(package, ()) or getattr(kind, "elementwise", False)
    if not known:
        named = ", ".join(n for names in _ELEMENTWISE.values() for n in sorted(names))
        raise ConfigError(
            f"{key}: ranks divide the model ({', '.join(layout)}), and it is not known whether "
            f"{kind.__module__}.{kind.__name__} computes each element by itself. One that takes a "
            "norm or a sum over a whole parameter or the whole model would get that of a rank's "
            f"part: use parallel=ddp, or one of {named}. A class of your own that computes each "
            "element by itself says so with an attribute `elementwise = True`"
        )
