"""The state of an optimizer by the names of the parameters, as a checkpoint has it.

    state.NAME.exp_avg       what the optimizer keeps for a parameter
    state.NAME.factors.[0]   a part of a list in it
    param_groups.NAME.lr     what it keeps for the group of a parameter

torch's functions for this call `optimizer.step()` once more where there is no state, and forget
what such a step does not make. Here nothing is called: a state is saved as it is, and it is loaded
as it was saved, with the same dtypes.

Some optimizers have `train()` and `eval()`: they train one set of weights and evaluate another.

    train()   the weights that get gradients (y of Defazio et al. 2024, "The Road Less Scheduled")
    eval()    the weights that are evaluated, saved and used (their average x)

Between two steps an evaluation or a save takes the second set. After it the first set is back bit
by bit, because `train()` alone would leave rounding, and a run that is evaluated more often would
be another one.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import ConfigError
from hpctrain.engine.checkpoint.saved_state import empty_of
from hpctrain.engine.distributed.tensors import local

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Tensor)
_INNER = (torch.Tensor, list, tuple, dict)


class OptimizerState:
    """The state of an optimizer, to be saved and loaded.

    `parameters` are those that the optimizer may have, by their names in the plain model.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._names = {id(p): name for name, p in self._parameters.items()}

    @property
    def kind(self) -> str:
        """The full name of the optimizer's class."""
        return f"{type(self._optimizer).__module__}.{type(self._optimizer).__qualname__}"

    def flat(self) -> dict[str, Any]:
        """Return the state, whose tensors are those of the optimizer."""
        held, names = self._optimizer.state_dict(), self._listed()
        if more := held.keys() - {"state", "param_groups"}:
            raise self._refused(f"state_dict() also has {sorted(more)[0]!r}")
        found: dict[str, Any] = {}
        for index, state in held["state"].items():
            if not isinstance(index, int) or index >= len(names):
                raise self._refused(f"state[{index!r}] belongs to no parameter")
            found |= _flat(state, f"state.{names[index]}")
        for group in held["param_groups"]:
            own = {key: value for key, value in group.items() if key != "params"}
            for index in group["params"]:
                found |= {f"param_groups.{names[index]}.{key}": v for key, v in own.items()}
        return {key: self._checked(key, value) for key, value in found.items()}

    def wanted(self, saved: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Return tensors to load a saved state into, and None for what is no tensor.

        `kind` is that of the optimizer whose state was saved; "" if it is not known.
        """
        now, made, found = self.flat(), dict[str, dict[str, Any]](), dict[str, Any]()
        own = {f"state.{name}": name for name in self._parameters}
        for key, entry in saved.items():
            if (place := owner(key, own)) is not None:
                made.setdefault(own[place], {})[key.removeprefix(f"{place}.")] = entry
        for name, entries in made.items():
            if kind not in ("", self.kind):
                raise ConfigError(
                    f"optimizer: the checkpoint has the state of {kind}, and this run has "
                    f"{self.kind}: go on with that optimizer, or begin a run from the weights "
                    "alone (checkpoint.init_from)"
                )
            for rest, entry in entries.items():
                key = f"state.{name}.{rest}"
                found[key] = self._empty(name, entry, now.get(key))
        firsts = {f"param_groups.{name}" for name in self._firsts()}
        found |= {key: empty_of(e) for key, e in saved.items() if owner(key, firsts) is not None}
        return found

    def load(self, flat: Mapping[str, Any]) -> None:
        """Give the optimizer what was loaded into `wanted`; what that lacks stays as it is."""
        held, names = self._optimizer.state_dict(), self._listed()
        own = {f"state.{name}": index for index, name in enumerate(names)}
        loaded: dict[int, dict[str, Any]] = {}
        for key, value in flat.items():
            if (place := owner(key, own)) is not None:
                _put(loaded.setdefault(own[place], {}), key.removeprefix(f"{place}."), value)
        loaded = {index: _with_lists(state) for index, state in loaded.items()}
        for index, state in loaded.items():
            held["state"][index] = held["state"].get(index, {}) | state
        for group, first in zip(held["param_groups"], self._firsts(), strict=True):
            start = f"param_groups.{first}."
            saved = {k.removeprefix(start): v for k, v in flat.items() if k.startswith(start)}
            if not group.get("fused"):
                # The kernels of a GPU may not be there, or not for parameters that are divided now.
                # A run that began without them goes on without them, to the same bits.
                saved.pop("fused", None)
            group |= saved
        self._optimizer.load_state_dict(held)
        # torch gives all states but "step" the dtype of the parameter.
        for index, state in loaded.items():
            parameter = self._parameters[names[index]]
            _exact(self._optimizer.state[parameter], state)

    def _listed(self) -> list[str]:
        """Return the names of the optimizer's parameters, in its order."""
        groups = self._optimizer.param_groups
        try:
            return [self._names[id(p)] for group in groups for p in group["params"]]
        except KeyError:
            raise self._refused("it has a parameter that the model does not train") from None

    def _firsts(self) -> list[str]:
        """Return the name of the first parameter of each group; "" for an empty group."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        return [self._names[id(group[0])] if group else "" for group in groups]

    def _empty(self, name: str, entry: Any, now: Any) -> Any:
        """Return a tensor for an entry, with the layout that the optimizer would give it."""
        made, parameter = empty_of(entry), self._parameters[name]
        if made is None:
            return None
        if isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (made.shape, made.dtype):
            return now
        if made.shape == parameter.shape:
            return torch.empty_like(parameter, dtype=made.dtype, requires_grad=False)
        return made

    def _checked(self, key: str, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
            raise self._refused(f"{key} is a sum whose parts the ranks have not added")
        if not _is_plain(value):
            raise self._refused(f"{key} is a {type(value).__name__}")
        return value

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"optimizer: a checkpoint cannot hold the state of {self.kind}: {why}. It holds what "
            "state[parameter] and param_groups have: tensors, numbers and texts, also in dicts and "
            "lists"
        )


def owner(key: str, owners: Container[str]) -> str | None:
    """Return the name, such as `state.layer.weight`, that a dotted key begins with, or None."""
    while key:
        key = key.rpartition(".")[0]
        if key in owners:
            return key
    return None


def _is_plain(value: Any) -> bool:
    """Return whether a value can be loaded without running code."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _flat(value: Any, name: str) -> dict[str, Any]:
    inner: Iterator[tuple[str, Any]] | None = None
    if isinstance(value, dict):
        inner = ((f"{key}", each) for key, each in value.items())
    elif isinstance(value, list | tuple) and any(isinstance(each, _INNER) for each in value):
        inner = ((f"[{i}]", each) for i, each in enumerate(value))
    if inner is None:
        return {name: value}
    return {k: v for key, each in inner for k, v in _flat(each, f"{name}.{key}").items()}


def _put(state: dict[str, Any], key: str, value: Any) -> None:
    """Set a value in nested dicts."""
    *outer, last = key.split(".")
    for part in outer:
        state = state.setdefault(part, {})
    state[last] = value


def _with_lists(value: Any) -> Any:
    """Return nested dicts in which those with the keys `[0]`, `[1]`, ... are lists again."""
    if not isinstance(value, dict):
        return value
    made = {key: _with_lists(each) for key, each in value.items()}
    if made and all(key.startswith("[") for key in made):
        return [made[f"[{i}]"] for i in range(len(made))]
    return made


def _exact(own: Any, loaded: Any) -> None:
    """Replace the tensors of a state whose dtype is not the loaded one, in place."""
    for key, value in loaded.items() if isinstance(loaded, dict) else enumerate(loaded):
        if isinstance(value, dict | list):
            if isinstance(own[key], dict | list):
                _exact(own[key], value)
        elif isinstance(value, torch.Tensor) and own[key].dtype != value.dtype:
            own[key] = value.to(own[key].device)


class OptimizerModes:
    """The two modes of optimizers; one without them has the same weights for everything.

    What is `changed` is called after the `parameters`, by name, were changed outside of a step.
    While other weights are evaluated or saved, `training` has those that are trained; it is empty
    without modes.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, torch.nn.Parameter],
        changed: Sequence[Callable[[], None]],
    ) -> None:
        pairs = [[getattr(o, name, None) for name in ("train", "eval")] for o in optimizers]
        self._switches: list[list[Any]] = [pair for pair in pairs if all(map(callable, pair))]
        self._changed, self._parameters = changed, parameters
        self.training: dict[str, torch.Tensor] = {}

    def train(self) -> None:
        """Begin the training; the parameters are those that `eval()` has left, or initial ones."""
        self._call(0)

    def empty(self) -> dict[str, torch.Tensor]:
        """Return tensors to load saved `training` weights into."""
        return {n: torch.empty_like(p, requires_grad=False) for n, p in self._parameters.items()}

    def restore(self, training: Mapping[str, torch.Tensor]) -> None:
        """Go on with what was saved as `training`, in `eval()`'s place; it may be empty."""
        self._call(0)
        self._set(training)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the parameters be those that are evaluated and saved."""
        if not self._switches:
            yield
            return
        self.training = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._call(1)
        try:
            yield
        finally:
            self._call(0)
            self._set(self.training)
            self.training = {}

    def _call(self, mode: int) -> None:
        """Let the optimizers train (0) or evaluate (1)."""
        for switches in self._switches:
            switches[mode]()
        if self._switches:
            self._set({})

    @torch.no_grad()
    def _set(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            local(self._parameters[name].detach()).copy_(local(value.detach()))
        for changed in self._changed:
            changed()
