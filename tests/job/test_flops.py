"""Tests of the FLOPs that are counted without memory or a GPU."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.insight.flops.flops import count_flops, flops_of_training, meta_batch, tokens_of
from hpctrain.insight.flops.identical_blocks import alike
from hpctrain.models import ConvNet, Transformer
from hpctrain.tasks import Classification, LanguageModel

small = partial(Transformer, vocab_size=64, dim=32, layers=6, heads=4)


def tokens(length: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(3, length, dtype=torch.int32), "mask": torch.ones(3).bool()}


def test_a_transformer_has_the_flops_of_the_formula() -> None:
    flops = flops_of_training(small, LanguageModel(), tokens(33))
    assert flops is not None
    assert flops.tokens == 32
    norms = 13 * 32  # parameters that PaLM's formula counts, though they are in no matrix product
    assert flops.training == 32 * (small().flops_per_token(32) - 6 * norms)
    assert flops.training == 3 * flops.forward


def test_blocks_that_are_alike_count_as_if_each_was_run() -> None:
    with torch.device("meta"):
        model = small()
    assert [len(names) for names in alike(model)] == [6]
    batch = meta_batch(tokens(33))
    flops = count_flops(model, LanguageModel(), batch)
    with FlopCounterMode(display=False) as whole:
        LanguageModel()(model, batch)["loss"][0].backward()
    assert flops is not None
    assert 2 * flops.training == whole.get_total_flops()
    assert sum(1 for _ in model.layers[5].parameters()) == 9  # the model is as before


def test_images_and_frozen_layers() -> None:
    def build(frozen: bool) -> ConvNet:
        model = ConvNet(1, [8, 16], 10, norm="batch")
        model.blocks.requires_grad_(not frozen)
        return model

    batch = {
        "image": torch.zeros(4, 1, 8, 8, dtype=torch.uint8),
        "label": torch.zeros(4, dtype=torch.int64),
        "mask": torch.ones(4).bool(),
    }
    whole, head = (
        flops_of_training(partial(build, frozen), Classification(), batch)
        for frozen in (False, True)
    )
    assert whole is not None
    assert head is not None
    assert head.forward == whole.forward
    assert head.training == head.forward + 2 * 16 * 10  # only the weight of the head is trained
    assert whole.tokens == tokens_of(Classification(), batch) == 0


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table(x) * int(x.max())


def test_what_cannot_be_counted() -> None:
    assert flops_of_training(NeedsValues, LanguageModel(), tokens(5)) is None


def test_experts_are_counted_as_if_all_were_used_evenly() -> None:
    build = partial(small, experts=4)
    flops = flops_of_training(build, LanguageModel(), tokens(33))
    assert flops is not None
    assert flops.training == 32 * (small(experts=4).flops_per_token(32) - 6 * 13 * 32)
