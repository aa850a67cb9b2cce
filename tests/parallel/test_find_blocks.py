"""Tests of which modules of a model are its blocks."""

import pytest
from torch import nn

from hpctrain.engine.parallel.preparing.blocks import find_blocks
from hpctrain.errors import ConfigError
from hpctrain.models import MLP, ConvNet, Transformer


def names(model: nn.Module, *classes: str) -> list[str]:
    return [name for name, _ in find_blocks(model, list(classes))]


class Stages(nn.Module):
    """A model like a ResNet: its lists have blocks of one class, and the blocks have lists."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.first = nn.Sequential(Stage(), Stage())
        self.second = nn.Sequential(Stage(), Stage())


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Unlisted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Stage(), Stage()


def test_of_our_models() -> None:
    assert names(Transformer(16, 8, 3, 2)) == ["layers.0", "layers.1", "layers.2"]
    assert names(ConvNet(1, [8, 8], 4)) == ["blocks.0", "blocks.1"]
    assert names(MLP(4, [4, 4], 2)) == ["1", "3", "5"], "layers without parameters do not count"


def test_a_list_of_two_classes() -> None:
    """Dense layers and layers with experts, whose lists have one class, are blocks."""
    dense = [nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]
    model = nn.ModuleDict({"embed": nn.Linear(8, 8), "layers": nn.ModuleList([*dense, Stage()])})
    assert names(model) == ["layers.0", "layers.1", "layers.2"]
    model["layers"] = nn.ModuleList([Unlisted(), Stages(), Stages(), nn.Sequential(Unlisted())])
    assert names(model) == ["layers.0", "layers.1", "layers.2", "layers.3"]
    # The layers of an encoder beside a head are finer, and remain the blocks.
    model = nn.ModuleDict({"encoder": Transformer(16, 8, 3, 2), "head": nn.Sequential(Stage())})
    assert names(model) == ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"]


def test_lists_of_one_class_belong_together() -> None:
    assert names(Stages()) == ["first.0", "first.1", "second.0", "second.1"]


def test_lists_of_lists_are_never_called_but_their_parts_are() -> None:
    layers = nn.ModuleList(
        nn.ModuleList([nn.ModuleList([nn.LayerNorm(8)]), nn.Linear(8, 8), Stage()])
        for _ in range(2)
    )
    assert names(nn.Sequential(layers)) == ["0.0.1", "0.0.2", "0.1.1", "0.1.2"]


def test_by_class_names() -> None:
    assert names(Unlisted(), "Stage") == ["one", "two"]


def test_what_cannot_be_found_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1))
    with pytest.raises(ConfigError, match=r"\(parallel\.blocks\); it has Linear, Conv1d"):
        find_blocks(model, [])
    with pytest.raises(ConfigError, match=r"\(parallel\.blocks\); it has Linear$"):
        find_blocks(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), [])
    with pytest.raises(ConfigError, match="has no module of class Layer; it has Stage"):
        find_blocks(Unlisted(), ["Layer"])
    with pytest.raises(ConfigError, match="within others"):
        find_blocks(Stages(), ["Sequential", "Stage"])
