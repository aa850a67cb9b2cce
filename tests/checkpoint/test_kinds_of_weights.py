"""Weights that would be copied as other numbers than they are, or left out in silence: refused."""

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from hpctrain.engine.checkpoint.starting_point import start_from
from hpctrain.engine.checkpoint.stored_weights import StoredWeights, open_weights
from hpctrain.errors import ConfigError, StorageError
from hpctrain.models import Transformer
from hpctrain.results.trained_model import load_weights
from hpctrain.runs.checkpoints.matching import Match
from hpctrain.runs.checkpoints.weight_files import WeightFiles, find_weights
from tests.checkpoint.test_starting_weights import LAYOUTS, MORE
from tests.parallel.parity import MODELS, Cell, build, either, whole
from tests.ranks import run_ranks
from tests.steps import save_alone

CODES = torch.arange(-16, 16, dtype=torch.int8).view(4, 8)
DRAW = torch.Generator().manual_seed(0)
WHOLE = {"fc.weight": torch.rand(4, 8, generator=DRAW), "fc.bias": torch.zeros(4)}


class Small(nn.Module):
    """A layer, a buffer that is saved, and one that is not."""

    _keys_to_ignore_on_load_unexpected = ("attn.bias",)  # as models of transformers have it

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(4), persistent=False)


def loaded(folder: Path, stored: dict[str, torch.Tensor], **options: Any) -> tuple[Small, Match]:
    """Return a model that has started from a file of these weights, and what has matched."""
    save_file(stored, folder / "model.safetensors")
    model = Small()
    weights = open_weights(find_weights(folder / "model.safetensors"))
    return model, start_from(model, weights, all_used=True, **options)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"fc.weight": CODES}, "fc.weight is stored as int8 and is float32 in the model"),
        ({"fc.weight": CODES.to(torch.float8_e4m3fn)}, "is stored as float8_e4m3 and is float32"),
        ({"fc.weight": CODES.to(torch.float8_e5m2)}, "is stored as float8_e5m2 and is float32"),
        ({"fc.weight": CODES > 0}, "fc.weight is stored as bool and is float32"),
        ({"fc.weight": CODES.long()}, "fc.weight is stored as int64 and is float32"),
        ({"fc.weight": CODES.to(torch.complex64)}, "is stored as complex64 and is float32"),
        ({"seen": torch.tensor(1.5)}, "seen is stored as float32 and is int64 in the model"),
        (
            {
                "fc.weight": torch.zeros(16, 1, dtype=torch.uint8),  # of bitsandbytes, in 4 bits
                "fc.weight.absmax": torch.ones(1),
                "fc.weight.quant_map": torch.ones(16),
            },
            "fc.weight is stored as uint8 and is float32 in the model",
        ),
        (
            {
                "fc.qweight": torch.zeros(1, 4, dtype=torch.int32),  # of GPTQ
                "fc.scales": torch.ones(1, 4, dtype=torch.float16),
            },
            "the model has nothing of these names, which are stored: fc.qweight, fc.scales",
        ),
    ],
)
def test_numbers_of_another_kind(
    stored: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, {"fc.bias": torch.zeros(4), **stored})
    assert message in str(caught.value)
    assert "take the release of the model in bf16, or dequantize it" in str(caught.value)
    # What the user names is left out, and the rest is loaded.
    skip = ["fc.[!b]*", "seen"]
    _, found = loaded(tmp_path, {"fc.bias": torch.zeros(4), **stored}, skip=skip)
    assert [*found.stored] == ["fc.bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float32])
def test_wider_and_narrower_floats_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {name: value.to(dtype) for name, value in WHOLE.items()}
    model, found = loaded(tmp_path, stored | {"seen": torch.tensor(3, dtype=torch.int32)})
    assert torch.equal(model.fc.weight, stored["fc.weight"].float())
    assert model.state_dict()["seen"] == 3
    assert not found.unused


def test_what_is_stored_has_a_use_or_is_named(tmp_path: Path) -> None:
    more = {"head.weight": torch.ones(2), "head.bias": torch.ones(2)}
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, WHOLE | more)
    assert "nothing of these names, which are stored: head.bias, head.weight" in str(caught.value)
    assert "checkpoint.init_skip=['head.bias', 'head.weight']" in str(caught.value)
    _, found = loaded(tmp_path, WHOLE | more, skip=["head.*"])
    assert not found.unused
    # What the model computes itself, and the frequencies that old files of transformers have.
    old = {name: torch.ones(4) for name in ("mask", "h.0.attn.bias", "a.rotary_emb.inv_freq")}
    _, found = loaded(tmp_path, WHOLE | old)
    assert not found.unused
    # A run that goes on takes what it took at its first start.
    save_file(WHOLE | more, tmp_path / "model.safetensors")
    assert start_from(Small(), open_weights(find_weights(tmp_path))).unused == [*sorted(more)]


@pytest.mark.parametrize("name", ["last.ckpt", "pytorch_model.bin"])
def test_the_message_about_a_pickle_has_the_line_that_converts_it(
    name: str, tmp_path: Path
) -> None:
    model = Transformer(16, 8, 1, 2, tied=True)
    weights = model.state_dict()
    torch.save({"state_dict": weights} if name == "last.ckpt" else weights, tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        find_weights(tmp_path)
    line = str(caught.value).partition("where you trust it: ")[2]
    places = {"FILE": tmp_path / name, "OUT": tmp_path / "model.safetensors"}
    exec(line, {"torch": torch, "safetensors": safetensors, **places})
    again = Transformer(16, 8, 1, 2, tied=True)
    found = start_from(again, open_weights(find_weights(places["OUT"])), all_used=True)
    assert len(found.stored) == len(weights)
    assert all(torch.equal(value, weights[n]) for n, value in again.state_dict().items())


def tied_values(cells: list[Cell], folder: Path) -> list[str]:
    """Return what each layout says about two values of a shared parameter, on this rank."""
    said = []
    for cell in cells:
        model = build(cell).model
        weights = open_weights(find_weights(folder / "same.safetensors"))
        found = start_from(model.module, weights, all_used=True)
        assert {"embed.weight", "head.weight"} <= found.stored.keys()
        only = open_weights(find_weights(folder / "head.safetensors"))
        assert not start_from(model.module, only, all_used=True).initial
        with pytest.raises(ConfigError) as caught:
            start_from(model.module, open_weights(find_weights(folder / "other.safetensors")))
        said.append(str(caught.value))
        other = open_weights(find_weights(folder / "other.safetensors"))
        found = start_from(model.module, other, skip=["embed.weight"], all_used=True)
        assert not found.initial
        assert whole(model)["embed.weight"][60, 31] > 0.5
    return said


ALL = {"one": (1, {})} | LAYOUTS | MORE


@pytest.mark.parametrize(
    "names", either([["zero3"]], [[n for n in ALL if "pp" not in n]]), ids=["some", "more"]
)
def test_two_values_of_a_shared_parameter(names: list[str], tmp_path: Path) -> None:
    cells = [Cell("transformer", ALL[n][0], tuple(ALL[n][1].items())) for n in names]
    stored = {n: v.clone() for n, v in MODELS["transformer"]().state_dict().items()}
    save_file(stored, tmp_path / "same.safetensors")
    head = {n: v for n, v in stored.items() if n != "embed.weight"}
    save_file(head, tmp_path / "head.safetensors")
    stored["head.weight"][60, 31] += 1  # of the last rank only
    save_file(stored, tmp_path / "other.safetensors")
    for size in {cell.ranks for cell in cells}:
        part = [cell for cell in cells if cell.ranks == size]
        for rank in run_ranks(tied_values, size, part, tmp_path):
            for said in rank:
                assert "embed.weight and head.weight are stored with different values" in said
                assert "checkpoint.init_skip=['head.weight']" in said


def saved_alone(model: nn.Module, folder: Path) -> StoredWeights:
    """Save the weights of a model as a checkpoint has them; return what reads them."""
    save_alone({"model": model.state_dict()}, folder)
    return open_weights(WeightFiles(folder, None))


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 16, "dim": 8, "layers": 1, "heads": 2}
    untied = saved_alone(Transformer(**sizes), tmp_path / "untied")
    with pytest.raises(StorageError, match=r"embed.weight and head.weight differ in the checkp"):
        load_weights(Transformer(**sizes, tied=True), tmp_path / "untied")
    with pytest.raises(ConfigError, match="are stored with different values"):
        start_from(Transformer(**sizes, tied=True), untied)
    model = Transformer(**sizes)
    model.norm.weight = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    codes = saved_alone(model, tmp_path / "int8")
    with pytest.raises(StorageError, match=r"model.norm.weight is int8 in the checkpoint and floa"):
        load_weights(Transformer(**sizes), tmp_path / "int8")
    with pytest.raises(ConfigError, match=r"norm.weight is stored as int8"):
        start_from(Transformer(**sizes), codes)
    saved_alone(Transformer(**sizes, tied=True), tmp_path / "tied")
    load_weights(Transformer(**sizes), tmp_path / "tied")
