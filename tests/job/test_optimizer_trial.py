"""Optimizers are tried on small tensors, whole and divided, before the first step."""

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpctrain.config.schema import OptimizerConfig
from hpctrain.errors import ConfigError
from hpctrain.job.building.build_optimizer import build_optimizer
from hpctrain.job.building.trial.optimizer_trial import OptimizerTrial
from tests.bounds import EXACT, within
from tests.parallel.parity import FP32, Cell, build, difference, reference, results
from tests.ranks import run_ranks
from tests.steps import make
from tests.training import optimizers

OWN = "tests.training.optimizers."
SHARDED = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, SHARDED | {"parallel.zero": 1}),
    "zero3": (4, SHARDED),
    "hsdp": (4, {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
    "tp": (2, {"parallel.tp": 2}),
    "tp, zero3": (4, {"parallel.tp": 2, "parallel.dp_replicate": 1, "parallel.dp_shard": 2}),
    "pp": (2, {"parallel.pp": 2, "train.accumulate": 2}),
    "pp, zero1": (
        4,
        {"parallel.pp": 2, "train.accumulate": 2, "parallel.zero": 1}
        | {"parallel.dp_replicate": 1, "parallel.dp_shard": 2},
    ),
    "offload": (2, SHARDED | {"parallel.fsdp.offload": True}),
}
TORCH = (
    "AdamW",
    "Adam",
    "SGD",
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
)
ELEMENTWISE = [
    *((f"torch.optim.{name}", {}) for name in TORCH),
    *((f"torch.optim.{name}", {"foreach": True}) for name in ("AdamW", "SGD", "NAdam")),
    *((f"torch.optim.{name}", {"fused": True}) for name in ("AdamW", "Adam")),
    ("torch.optim.AdamW", {"amsgrad": True, "capturable": True}),
    ("torch.optim.SGD", {"momentum": 0.9, "nesterov": True}),
    *((OWN + name, {}) for name in ("ScheduleFree", "Early", "Nested", "Lion", "Counted")),
    *((OWN + name, {}) for name in ("Rounded", "Noisy")),
]
# torch has no rule for dividing some operation of these.
FAILING = [
    ("torch.optim.Adafactor", {}),
    ("torch.optim.Rprop", {}),
    ("torch.optim.SGD", {"fused": True}),
]
SUMS = [OWN + name for name in ("Lamb", "Lars", "Prodigy", "WholeNorm")]


def said(keys: dict[str, Any], tried: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return what a trial of each optimizer says; "" if all is well."""
    ranks = torch.distributed.get_world_size()
    model = build(Cell("untied", ranks, tuple(keys.items()))).model
    found = []
    for target, options in tried:
        config = OptimizerConfig(target, lr=1e-3, options=options)
        try:
            OptimizerTrial(config, model, build_optimizer(config, model)).tried()
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_sums_over_a_part_are_refused_and_elements_are_not() -> None:
    tried = [OWN + "Lamb", OWN + "Prodigy", OWN + "ScheduleFree", OWN + "Rounded"]
    for found in run_ranks(said, 2, LAYOUTS["zero1"][1], [(target, {}) for target in tried]):
        lamb, prodigy, *others = found
        assert "ranks divide the model (dp_shard=2), its steps on small tensors differ by" in lamb
        assert "use parallel=ddp" in lamb
        assert "param_groups[...]['d_numerator'] is another number than in one process" in prodigy
        assert others == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str) -> None:
    ranks, keys = LAYOUTS[layout]
    sums = [(target, {}) for target in SUMS]
    for found in run_ranks(said, ranks, keys, [*ELEMENTWISE, *sums, *FAILING]):
        assert found[: len(ELEMENTWISE)] == [""] * len(ELEMENTWISE)
        texts = found[len(ELEMENTWISE) :]
        refused = [target for (target, _), text in zip(sums, texts, strict=False) if text]
        # The parameters of a stage are whole, so only what spans the model differs.
        assert refused == (SUMS[2:] if layout == "pp" else SUMS)
        for text in texts[-len(FAILING) :]:
            assert ("does not work where ranks divide the model" in text) == (layout != "pp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *itertools.product(("Lion", "Early", "Lamb", "WholeNorm"), ("zero1", "tp", "pp")),
        *(("ScheduleFree", layout) for layout in ("zero1", "pp")),  # tp rounds, as for AdamW
    ],
)
def test_a_trial_says_what_a_training_does(name: str, layout: str) -> None:
    """What is refused trains another model, and what is not trains the same."""
    ranks, keys = LAYOUTS[layout]
    cell = Cell("untied", ranks, tuple(keys.items()), optimizer=OWN + name, steps=3)
    (by_rank,) = results((cell,)).values()
    apart = difference(by_rank[0], reference("untied", OWN + name, 3))[2]
    (refused, *_) = run_ranks(said, ranks, keys, [(OWN + name, {})])[0]
    assert bool(refused) == (apart > 1e-4), apart
    if not refused:
        within([apart], EXACT)


@pytest.mark.slow
def test_muon_differs_by_rounding_and_this_is_said() -> None:
    for texts in run_ranks(logged, 2, LAYOUTS["zero1"][1]):
        assert len(texts) < 2
        for text in texts:
            assert "differ by" in text
            assert "by rounding" in text


def logged(keys: dict[str, Any]) -> list[str]:
    import logging

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hpctrain").addHandler(handler)
    assert said(keys | dict(FP32), [(OWN + "muon", {})]) == [""]
    logging.getLogger("hpctrain").removeHandler(handler)
    assert bool(texts) == (torch.distributed.get_rank() == 0)
    return texts


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("target", "text"),
    [
        (OWN + "Counting", "when it goes on from a checkpoint, its next steps are others"),
        (OWN + "Around", "when it goes on from a checkpoint, its next steps are others"),
        (OWN + "Extra", r"state_dict\(\) also has 'slow'"),
        (OWN + "Closed", "needs a closure that computes the loss again"),
        ("torch.optim.LBFGS", "needs a closure that computes the loss again"),
        ("torch.optim.SparseAdam", "needs sparse gradients"),
    ],
)
def test_what_one_process_cannot_have_is_refused(target: str, text: str) -> None:
    model = make().model
    config = OptimizerConfig(target, lr=1e-3)
    with pytest.raises(ConfigError, match=text):
        OptimizerTrial(config, model, build_optimizer(config, model)).run()


@pytest.mark.usefixtures("group_of_one")
def test_nothing_is_left_of_a_trial() -> None:
    model = make().model
    config = OptimizerConfig(OWN + "Counted", lr=1e-3)
    optimizer = build_optimizer(config, model)
    stepped: list[Any] = []
    legacy = np.random.get_state
    hook = register_optimizer_step_post_hook(lambda *_: stepped.append(1))
    seen = optimizers.Counted.seen
    before = (torch.get_rng_state(), random.getstate(), str(legacy()))
    values = [p.detach().clone() for p in model.parameters]
    kept = (dict(vars(optimizers.Counted)), list(seen), optimizers.Counted.calls)
    began = time.thread_time()
    OptimizerTrial(config, model, optimizer).run()
    assert time.thread_time() - began < 1  # it takes about 0.02 s
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(legacy()))
    assert optimizers.Counted.seen is seen
    assert kept == (dict(vars(optimizers.Counted)), list(seen), optimizers.Counted.calls)
    assert all(map(torch.equal, values, model.parameters))
    assert all(p.grad is None for p in model.parameters)
    assert not stepped
    assert not optimizer.state
    assert "count" not in optimizer.param_groups[0]
    optimizer.step()
    assert stepped, "the hooks of others are back"
    hook.remove()
