"""What must hold of any prediction: how memory, time and FLOPs change with the layout and model."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.config.schema import Config
from hpctrain.data.shards.types import Batch
from hpctrain.insight.estimates.hardware import load
from hpctrain.insight.flops.flops import count_flops, meta_batch
from hpctrain.insight.plan.inspecting.activations import Activations, MeasuredActivations
from hpctrain.insight.plan.inspecting.model_facts import facts_of
from hpctrain.insight.plan.inspecting.sample_shape import sample_of
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.plan_command import main
from hpctrain.insight.plan.predicting.estimator import Estimator
from hpctrain.models import Transformer
from hpctrain.tasks import Classification, LanguageModel, Regression

Build = Callable[[], nn.Module]
# The gradient of its head is larger than what a sample keeps.
SMALL = partial(Transformer, vocab_size=16384, dim=64, layers=8, heads=8, kv_heads=4)


def sample(length: int = 65) -> Batch:
    tokens = torch.empty((1, length), dtype=torch.int64, device="meta")
    return {"tokens": tokens, "mask": torch.empty(1, dtype=torch.bool, device="meta")}


def activations(build: Build, mode: str = "none") -> Activations:
    return MeasuredActivations(build, LanguageModel(), sample(), None)[mode]


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    with torch.device("meta"):
        model = SMALL()
    facts = facts_of(model, LanguageModel(), sample())
    measured = MeasuredActivations(SMALL, LanguageModel(), sample(), torch.bfloat16)
    return Estimator(model, facts, measured)


def layout(batch: int, ranks: int = 1, **keys: Any) -> Layout:
    config = Config(model={"_target_": "any"})
    config.precision.compute, config.launch.tasks_per_node = "bf16", ranks
    config.train.global_batch_size = batch
    for key, value in keys.items():
        section, name = key.rsplit("__", 1)
        setattr(attrgetter(section.replace("__", "."))(config), name, value)
    return Layout(config, 1, ())


def test_activations_grow_with_the_micro_batch_alone(estimator: Estimator) -> None:
    def memory(micro: int, accumulate: int) -> Any:
        one = layout(micro * accumulate, train__accumulate=accumulate)
        return estimator.of(one, load("h200")).memory

    alone = [memory(micro, 1) for micro in (1, 2, 4, 8, 64, 512)]
    assert [memory(1, n).activations for n in (2, 8, 64)] == [alone[0].activations] * 3
    assert alone[0].activations > 0
    for few, more in pairwise(alone):
        assert few.activations < more.activations
        assert few.logits < more.logits
        assert few.total <= more.total
    saved = estimator.activations["none"].saved
    assert alone[-1].activations == pytest.approx(512 * saved, rel=0.2)


def test_memory_falls_with_each_degree(estimator: Estimator) -> None:
    def total(parts: int = 1, **keys: Any) -> int:
        divided = keys.get("tp", 1) * keys.get("cp", 1) * keys.get("pp", 1)
        named = {f"parallel__{name}": value for name, value in keys.items()}
        one = layout(64 // divided, 8, train__accumulate=parts, **named)  # 8 samples of a rank
        return estimator.of(one, load("h200")).memory.total

    whole = {"dp_replicate": 1, "dp_shard": -1}
    ddp, zero1, zero3 = total(), total(**whole, zero=1), total(**whole, zero=3)
    assert ddp > zero1 > zero3
    assert total(dp_replicate=2, dp_shard=4, zero=3) > zero3
    for name in ("tp", "cp"):
        found = [total(dp_replicate=-1, **{name: n}) for n in (2, 4)]
        assert found[0] > found[1]
    pipelines = [total(dp_replicate=-1, pp=n, parts=8) for n in (2, 4, 8)]
    assert pipelines == sorted(pipelines, reverse=True)


def test_context_parallel_gathers_the_keys_of_grouped_heads(estimator: Estimator) -> None:
    """Of 4 heads of 8, keys and values are as wide as the residual stream; of 1, an eighth of 2."""
    assert estimator.facts.keys_values == 64
    other = replace(estimator.facts, keys_values=16)
    few = Estimator(SMALL(), other, estimator.activations)
    one = layout(8, 8, parallel__dp_replicate=1, parallel__cp=8)
    more, less = (each.of(one, load("h200")) for each in (estimator, few))
    kept = 8 * 64 * (7 / 8) * 2 * 8  # samples, positions, from other ranks, bytes, blocks
    assert more.memory.activations - less.memory.activations == 48 * kept
    assert more.time.comm_s > less.time.comm_s


def test_time_falls_with_more_gpus(estimator: Estimator) -> None:
    times = [estimator.of(layout(4096, n), load("h200")).time for n in (1, 2, 4, 8)]
    steps = [time.step_s for time in times if time]
    assert len(steps) == 4
    assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
def test_blocks_add_up_and_checkpointing_keeps_less() -> None:
    few, more = (activations(partial(SMALL, layers=n)) for n in (8, 16))
    whole = activations(SMALL)
    assert more.saved - few.saved == pytest.approx(8 / 8 * few.saved, rel=0.1)
    assert (more.working, more.outside) == (few.working, few.outside)
    assert whole.saved > activations(SMALL, "full").saved
    measured = MeasuredActivations(SMALL, LanguageModel(), sample(), torch.bfloat16)
    lower, autocast = (measured.of("none", cast=cast).saved for cast in (True, False))
    assert lower < 0.9 * autocast


class Unlisted(nn.Module):
    """Two layers that no list shows to be blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.one, self.two = (nn.Sequential(nn.Linear(8, 64), nn.GELU()) for _ in range(2))
        self.three, self.four = nn.Linear(64, 8), nn.Linear(64, 16)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.four(self.two(self.three(self.one(self.table(tokens)))))


def test_checkpointing_is_of_the_blocks_that_the_config_names() -> None:
    def saved(mode: str, classes: list[str]) -> int:
        return MeasuredActivations(Unlisted, LanguageModel(), sample(), None, classes)[mode].saved

    assert saved("full", ["Sequential"]) < saved("none", [])
    with torch.device("meta"):
        model = Unlisted()
    facts = [
        facts_of(model, LanguageModel(), sample(), names).blocks for names in ((), ("Linear",))
    ]
    assert facts[1] == 4


class Attends(nn.Module):
    """Attention with dropout, as models of transformers have it by default."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table, self.dropout = nn.Embedding(16, 8), dropout

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.table(tokens).unsqueeze(1)
        x = F.scaled_dot_product_attention(x, x, x, None, self.dropout, is_causal=True)
        return x.squeeze(1) @ self.table.weight.T


def test_dropout_adds_its_masks_but_no_scores() -> None:
    assert activations(partial(SMALL, dropout=0.1)).saved > activations(SMALL).saved
    assert activations(partial(Attends, 0.1)) == activations(partial(Attends, 0.0))


class LooksAtValues(nn.Module):
    """It decides by a value, unless it knows that there is none, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, tokens: torch.Tensor) -> Any:
        if not isinstance(tokens, torch._subclasses.FakeTensor) and (tokens[:, 0] == 0).all():
            return self.table(tokens) @ self.table.weight.T
        return self.table(tokens) @ self.table.weight.T


def test_flops_are_counted_with_fake_tensors_where_meta_is_not_enough() -> None:
    with torch.device("meta"):
        model = LooksAtValues()
    found = count_flops(model, LanguageModel(), meta_batch(sample()))
    assert found is not None
    assert (found.forward, found.training) == (64 * 2 * 8 * 16, 64 * 6 * 8 * 16)
    assert all(p.is_meta and p.grad is None for p in model.parameters())


LORA = ["model=lm_small", "model.dim=1024", "--sample-shape", "17", "train.global_batch_size=1"]


def test_a_base_in_4_bits_is_counted_packed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hpctrain.insight.plan.plan_command.known", lambda *_: []
    )  # they take seconds

    def plan(*words: str, code: int = 0) -> Any:
        match = "train.lora.match=[layers.*]"  # no base has to be named
        assert main([*LORA, match, "precision=bf16", "hardware=rtx_4090", *words, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    one = ["parallel=single", "launch.nodes=1", "launch.tasks_per_node=1"]
    small = "hardware.memory_gib=1.15"
    whole = plan(*one, small, code=8)["layouts"][0]
    found = plan(*one, small, "train.lora.quantize=nf4")["layouts"][0]
    layers = 4 * (4 * 1024 * 1024 + 3 * 1024 * 2752)
    bits = 4 + 8 / 64 + 32 / 64 / 256
    saved = layers * (32 - bits) / 8
    assert found["memory"]["parameters"] == whole["memory"]["parameters"] - saved
    words = ["--nodes", "1", "train.global_batch_size=4", "train.lora.quantize=nf4"]
    excluded = plan(*words)["assumptions"]["excluded"]
    assert "a weight in 4 bits is packed in blocks" in excluded["zero3 on 4 ranks"]


class TwoInputs(nn.Module):
    """It maps the channels of two fields of a grid to one number for each class and pixel."""

    def __init__(self, channels: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, classes, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.parametrize(
    ("task", "shape", "size"),
    [
        (Classification(), {"image": (2, 16, 16), "label": (16, 16)}, 16 * 16),
        (Regression(["u", "v"], "y"), {"u": (8, 8), "v": (8, 8), "y": (3, 8, 8)}, 8 * 8),
    ],
    ids=["a class of each pixel", "two inputs"],
)
def test_dense_targets_and_several_inputs(task: Any, shape: dict[str, Any], size: int) -> None:
    whole = {"label": torch.int64}
    fields = sample_of({n: (s, whole.get(n, torch.float32)) for n, s in shape.items()})
    found = MeasuredActivations(TwoInputs, task, fields, None)["none"]
    assert found.outputs == 4 * 3 * size
    with torch.device("meta"):
        flops = count_flops(TwoInputs(), task, meta_batch(fields))
    assert flops is not None
    assert flops.forward == 2 * 2 * 3 * size
