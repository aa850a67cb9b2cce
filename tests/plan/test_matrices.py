"""The matrix products of a model, and the time that they take."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hpctrain.config.schema import Config
from hpctrain.insight.estimates.hardware import load
from hpctrain.insight.plan.inspecting.activations import Activations
from hpctrain.insight.plan.inspecting.model_facts import ModelFacts, facts_of
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.predicting.timing import Efficiencies, StepTime, step_time
from hpctrain.models import ConvNet, Transformer
from hpctrain.tasks import Classification, LanguageModel

_LM = partial(Transformer, vocab_size=512, dim=512, layers=6, heads=8, hidden=1024)


def _facts(build: Any, length: int = 256) -> ModelFacts:
    with torch.device("meta"):
        model: nn.Module = build()
        sample = {"mask": torch.empty(1, dtype=torch.bool)}
        if isinstance(model, Transformer):
            sample["tokens"] = torch.empty((1, length + 1), dtype=torch.int64)
            return facts_of(model, LanguageModel(), sample)
        sample |= {"image": torch.empty(1, 3, 32, 32), "label": torch.empty(1, dtype=torch.int64)}
        return facts_of(model, Classification(), sample)


def _time(facts: ModelFacts, compute: str = "bf16", **parallel: Any) -> StepTime:
    config = Config(model={"_target_": "any"})
    config.precision.compute, config.train.global_batch_size = compute, 64
    for name, value in parallel.items():
        setattr(config.parallel, name, value)
    nothing = Activations(0, 0, 0, 0)
    found = step_time(Layout(config, 1, ()), facts, nothing, load("h100_sxm"), Efficiencies())
    assert found is not None
    return found


def test_the_products_of_the_layers_are_the_operations_that_are_counted() -> None:
    net = partial(ConvNet, in_channels=3, widths=[8, 16], out_features=10)
    facts = _facts(net)
    assert facts.flops is not None
    assert sum(m.flops for m in facts.matrices) == facts.flops.forward
    assert {m.positions for m in facts.matrices} > {32.0 * 32.0, 1.0}
    dense = _facts(_LM)
    assert dense.flops is not None
    attention = 6 * 4 * 256 * 256 * 512
    assert sum(m.flops for m in dense.matrices) == dense.flops.forward - attention


class _Shrinks(nn.Module):
    """Two layers of one class and shape, of which the second gets an eighth of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(image)[:, :, :4]).mean((1, 2)))


def test_layers_that_look_the_same_have_their_own_positions() -> None:
    facts = _facts(_Shrinks)
    assert [matrix.positions for matrix in facts.matrices] == [3 * 32, 3 * 4, 1]
    assert {(m.rows, m.positions) for m in _facts(_LM).matrices} == {
        *((512, 256.0), (1024, 256.0))  # also of the blocks that were left out
    }


def _grouped(groups: int, layout: torch.memory_format) -> nn.Module:
    first, grouped = nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=groups)
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(first, grouped, *last).to(memory_format=layout)


def test_a_convolution_with_groups_takes_the_time_of_moving_what_it_reads_and_writes() -> None:
    facts = _facts(partial(_grouped, 64, torch.channels_last))
    matrix = facts.matrices[1]
    assert facts.flops is not None
    assert (matrix.rows, matrix.columns, matrix.number, matrix.positions) == (1, 9, 64, 1024)
    assert sum(m.flops for m in facts.matrices) == facts.flops.forward
    assert matrix.moved == 2 * 64 * 32 * 32
    hardware, last = load("h100_sxm"), _time(facts).compute_s
    assert hardware.memory_bandwidth
    assert last > 64 * 2 * matrix.moved * 2 / hardware.memory_bandwidth


def test_channels_first_takes_longer_in_16_bits_alone() -> None:
    first, last = (
        _facts(partial(_grouped, 1, layout))
        for layout in (torch.contiguous_format, torch.channels_last)
    )
    assert _time(first).compute_s > 1.2 * _time(last).compute_s
    assert _time(first, "tf32").compute_s == _time(last, "tf32").compute_s


def test_full_checkpointing_computes_again_all_but_the_last_product_of_a_block() -> None:
    facts = _facts(_LM)
    assert facts.flops is not None
    tokens, dim, hidden = 256, 512, 1024
    left_out = 6 * 2 * tokens * dim * hidden + 2 * tokens * dim * 512  # and the head
    assert facts.again == facts.flops.forward - left_out
    assert 0.5 < facts.again / facts.flops.forward < 1


def test_of_experts_those_count_that_a_token_uses_and_few_tokens_go_to_each() -> None:
    facts = _facts(partial(_LM, experts=64, experts_per_token=2, expert_hidden=512))
    banks = [m for m in facts.matrices if m.number == 64]
    assert len(banks) == 3 * 6
    assert {m.positions for m in banks} == {256 * 2 / 64}
    # The experts of a token are as many operations as a dense MLP of that width.
    dense = _time(_facts(_LM))
    assert dense.compute_s < _time(facts).compute_s < 4 * dense.compute_s


def test_in_fp8_attention_and_the_head_compute_in_16_bits() -> None:
    long = _facts(partial(_LM, layers=1, dim=64, hidden=64, heads=1), 4096)
    assert sum(m.fp8 for m in long.matrices) == 7
    ratio = _time(long, "bf16").compute_s / _time(long, "fp8").compute_s
    assert ratio < 1.1  # nearly all of it is attention, and casting takes time
    wide = _facts(partial(_LM, layers=1, dim=8192, hidden=32768, heads=64), 1024)
    assert 1.3 < _time(wide, "bf16").compute_s / _time(wide, "fp8").compute_s < 2


def test_adapters_send_only_their_own_gradients() -> None:
    facts = _facts(partial(_LM, dim=1024))
    config = Config(model={"_target_": "any"})
    config.precision.compute, config.train.global_batch_size = "bf16", 64
    config.launch.tasks_per_node = 8
    config.parallel.dp_replicate, config.parallel.dp_shard = -1, 1
    layout, nothing = Layout(config, 1, ()), Activations(0, 0, 0, 0)
    times = [
        step_time(layout, each, nothing, load("h100_sxm"), Efficiencies())
        for each in (facts, replace(facts, trainable=facts.trainable // 100))
    ]
    whole, adapters = (time.comm_s for time in times if time)
    assert adapters < 0.6 * whole
