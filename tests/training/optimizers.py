"""Optimizers as others write them, small but faithful, for tests."""

import math
from typing import Any

import torch
from torch.optim import Optimizer


class Own(Optimizer):
    """What these have in common: a step on each parameter that has a gradient."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def begin(self, group: dict[str, Any]) -> None:
        """Do what a group does once in a step."""

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        raise NotImplementedError


class Prodigy(Optimizer):
    """Mishchenko & Defazio 2024: Adam whose rate d is estimated from sums over all parameters."""

    def __init__(self, params: Any, lr: float = 1.0, weight_decay: float = 0.0) -> None:
        numbers = {"d": 1e-6, "d0": 1e-6, "d_max": 1e-6, "d_numerator": 0.0, "k": 0}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **numbers})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]
        d, d0, lr, denominator = first["d"], first["d0"], first["lr"], 0.0
        numerator = first["d_numerator"] * math.sqrt(0.999)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(p0=p.clone(), s=torch.zeros_like(p))
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            # `dot` would round by the alignment of the gradient, which DDP changes.
            numerator += (d / d0) * d * lr * (p.grad * (state["p0"] - p)).sum().item()
            state["m"].mul_(0.9).add_(p.grad, alpha=d * 0.1)
            state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=d * d * 0.001)
            state["s"].mul_(math.sqrt(0.999)).add_(p.grad, alpha=(d / d0) * d * lr)
            denominator += state["s"].abs().sum().item()
        if denominator:
            found = numerator / denominator
            d = max(d, found if d != d0 else max(d, found))
        for group in self.param_groups:
            group.update(d=d, d_max=max(group["d_max"], d), d_numerator=numerator)
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    p.addcdiv_(state["m"], state["v"].sqrt().add_(d * 1e-8), value=-d * lr)


class ScheduleFree(Own):
    """Defazio et al. 2024, as `schedulefree.AdamWScheduleFree` writes it."""

    elementwise = True

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        numbers = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": False}
        super().__init__(params, lr, weight_decay, beta=0.9, **numbers)

    def eval(self) -> None:
        self._switch(train=False)

    def train(self) -> None:
        self._switch(train=True)

    @torch.no_grad()
    def _switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in (state := self.state[p]):  # this makes an empty entry
                        p.lerp_(state["z"], weight)
                group["train_mode"] = train

    def begin(self, group: dict[str, Any]) -> None:
        assert group["train_mode"], "the optimizer was not in train mode when step was called"
        group["lr_max"] = max(group["lr"], group["lr_max"])
        group["weight"] = group["lr_max"] ** 2
        group["weight_sum"] += group["weight"]
        group["k"] += 1

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if "z" not in state:
            state.update(z=p.clone(), v=torch.zeros_like(p))
        state["v"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        scaled = grad / (state["v"] / (1 - 0.999 ** group["k"])).sqrt().add_(1e-8)
        scaled = scaled.add_(p, alpha=group["weight_decay"])
        part = group["weight"] / group["weight_sum"]
        p.lerp_(state["z"], part)
        p.add_(scaled, alpha=group["lr"] * (group["beta"] * (1 - part) - 1))
        state["z"].sub_(scaled, alpha=group["lr"])


class Early(Own):
    """It makes its state in the constructor, as Adagrad does, and more of it in a step."""

    elementwise = True

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.1, requires_grad=False)

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(p)
        state["sum"].addcmul_(grad, grad)
        state["buffer"].mul_(0.9).addcdiv_(grad, state["sum"].sqrt())
        p.add_(state["buffer"], alpha=-group["lr"])


class Nested(Own):
    """It keeps lists and dicts, and numbers of several kinds."""

    elementwise = True

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            zeros = torch.zeros_like
            state.update(parts=[zeros(p), zeros(p)], more={"mean": zeros(p), "count": 0}, none=None)
            state["count"] = torch.zeros((), dtype=torch.int64)
            state["exact"] = zeros(p, dtype=torch.float64)
        state["count"] += 1
        state["more"]["count"] += 1
        state["parts"][0].lerp_(grad, 0.1)
        state["parts"][1].lerp_(grad * grad, 0.1)
        state["more"]["mean"].add_(p)
        state["exact"].add_(grad, alpha=1 / 3)
        update = state["parts"][0] / (state["parts"][1].sqrt() + 1e-3)
        p.add_(update + state["more"]["mean"] / state["more"]["count"], alpha=-group["lr"])
        p.add_(state["exact"].to(p.dtype), alpha=-0.1 * group["lr"] / int(state["count"]))


class RowWise(Own):
    """One number for each row, which a state with fewer dimensions holds."""

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        square = grad * grad if p.ndim < 2 else (grad * grad).flatten(1).mean(1)
        state["sum"] = state["sum"] + square if "sum" in state else square
        scale = state["sum"].sqrt() + 1e-8
        p.sub_(group["lr"] * grad / scale.view(-1, *[1] * (p.ndim - 1)))


class Lion(Own):
    """Chen et al. 2023."""

    elementwise = True

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(state["m"].lerp(grad, 0.1).sign(), alpha=-group["lr"])
        state["m"].lerp_(grad, 0.01)


class Counting(Own):
    """It counts its steps in an attribute, which no checkpoint has."""

    calls = 0

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.count = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.count += 1
        type(self).calls += 1

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] / self.count)


class Counted(Counting):
    """It counts in its group, so that a checkpoint has the number."""

    def begin(self, group: dict[str, Any]) -> None:
        self.count = group["count"] = group.get("count", 0) + 1
        Counted.calls += 1


class Around(Optimizer):
    """An optimizer around another one, whose state it forgets."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        self.inner = torch.optim.AdamW(params, lr, weight_decay=weight_decay)
        super().__init__(self.inner.param_groups, {"lr": lr})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Extra(Own):
    """It has more in `state_dict()` than a checkpoint takes."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": {}}

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        p.sub_(grad, alpha=group["lr"])


class Fused(torch.optim.AdamW):
    """torch's, with the kernels that it gets on a GPU."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
