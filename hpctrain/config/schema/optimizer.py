"""The keys of `optimizer` and `scheduler`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key, section

_FUSED = {f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD")}
_IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}


@dataclass
class OptimizerConfig:
    """The optimizer (torch's or your own), its learning rate, and rules for some parameters."""

    _target_: str = key(
        "torch.optim.AdamW",
        "This class is the optimizer. It, or a function that returns an optimizer, gets a list of "
        "the parameters, lr, weight_decay and options. If its first argument is called "
        "named_parameters, it gets pairs of a name and a parameter. If its groups of parameters "
        "have learning rates of their own, lr_scaling and the schedule multiply all of them by "
        "one factor.",
    )
    lr: float = key(
        1e-3,
        "The learning rate has this value after warm-up, unless lr_scaling changes it.",
        above=0,
    )
    lr_scaling: str = key(
        "none",
        "The learning rate is lr (none), or lr times train.global_batch_size / base_batch_size "
        "(linear), or lr times the square root of that ratio (sqrt).",
        choices=("none", "linear", "sqrt"),
    )
    base_batch_size: int | None = key(
        None,
        "lr was chosen for this global batch size. lr_scaling=linear and sqrt need it.",
        count="samples",
    )
    weight_decay: float = key(0.0, "The optimizer gets this weight decay.", at_least=0)
    options: dict[str, Any] = key({}, "The optimizer also gets these keyword arguments.")
    groups: list[dict[str, Any]] = key(
        [],
        "Each of these is {match: PATTERN, lr_factor: ..., weight_decay: ..., freeze: ..., "
        "options: ...} for the parameters whose names match the pattern, such as '*.bias', or one "
        "of a list of patterns. lr_factor multiplies the learning rate, freeze=true does not train "
        "them, and options are arguments of the optimizer in place of the others. If several match "
        "and give the same key, the last one decides.",
    )
    layer_decay: float | None = key(
        None,
        "Each block has the learning rate of the next one times this factor; what is behind the "
        "last block has the whole rate. Null gives all blocks the same. parallel.blocks names the "
        "classes of blocks that are not found.",
        above=0,
        at_most=1,
    )

    @property
    def states(self) -> int:
        """The tensors of the size of a parameter that it keeps; 2 for one that is not torch's."""
        name, options = self._target_.rpartition(".")[2], self.options
        if name == "SGD":
            return int(bool(options.get("momentum")))
        if name == "RMSprop":
            return 1 + bool(options.get("momentum")) + bool(options.get("centered"))
        return (1 if name in ("ASGD", "Adagrad") else 2) + bool(options.get("amsgrad"))

    @property
    def fuses(self) -> bool:
        """Whether torch can fuse its step into few kernels, and no option chooses others."""
        chosen = {*self.options, *(n for rule in self.groups for n in rule.get("options") or ())}
        return self._target_ in _FUSED and not chosen & _IMPLEMENTATIONS


@dataclass
class PlateauConfig:
    """scheduler.kind=plateau lowers the learning rate when a metric does not get better."""

    metric: str = key("val/loss", "This metric decides.")
    factor: float = key(0.1, "The learning rate is multiplied by this.", above=0, below=1)
    patience: int = key(
        5,
        "So many values in a row that are not better lower the rate: val/NAME has one for each "
        "evaluation, train/NAME one for each train.log_every steps.",
        at_least=1,
    )


@dataclass
class SchedulerConfig:
    """The learning rate over the steps: a linear warm-up, then a decay."""

    kind: str = key(
        "cosine",
        "After warm-up the learning rate stays constant, or falls linearly or along a cosine. wsd "
        "falls only in the last part of the run (decay_fraction). one_cycle rises in 30 % of the "
        "steps and falls along cosines, without another warm-up. plateau "
        "falls when a metric does not get better (scheduler.plateau).",
        choices=("constant", "linear", "cosine", "wsd", "one_cycle", "plateau"),
    )
    warmup_steps: int = key(
        0, "The learning rate rises from 0 over this many steps.", unit="steps", at_least=0
    )
    warmup_epochs: float | None = key(
        None,
        "The warm-up has this many epochs, in place of warmup_steps. Null or 0 is not used.",
        unit="epochs",
        at_least=0,
    )
    final_ratio: float = key(
        0.0,
        "The decay ends at this fraction of the learning rate after warm-up.",
        at_least=0,
        at_most=1,
    )
    decay_fraction: float = key(
        0.2, "kind=wsd falls in this last part of the steps.", at_least=0, at_most=1
    )
    plateau: PlateauConfig = section(PlateauConfig)
    _target_: str | None = key(
        None,
        "This function of the step, counted from 0, returns a factor of the learning rate, in "
        "place of kind. If its first argument is called optimizer, as that of torch's schedulers, "
        "it makes a scheduler. It gets max_steps if it has such an argument, and options.",
    )
    options: dict[str, Any] = key({}, "`_target_` also gets these keyword arguments.")
