"""The base of QLoRA is packed layer by layer while it is read, so a rank never holds it unpacked.

bitsandbytes is not there in every environment: half a byte for each element stands for its codes.
tests/parallel/test_qlora.py has the real ones.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hpctrain.addons import quantized
from hpctrain.addons.quantized import FourBitLinear, packed_bytes, quantize
from hpctrain.engine.checkpoint.saved_state import plain_name
from hpctrain.engine.checkpoint.starting_point import start_from
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.engine.distributed.tensors import is_released
from hpctrain.engine.layers.lora import adapted, is_adapter
from hpctrain.models import MLP
from hpctrain.runs.checkpoints.weight_files import find_weights
from tests.parallel.live import Live
from tests.parallel.parity import spread
from tests.ranks import run_ranks
from tests.steps import config_with

WIDTH, LAYERS = 256, [str(number) for number in range(3, 19, 2)]
LARGE = 4 * WIDTH * WIDTH  # bytes of one of these layers


def make() -> nn.Module:
    return MLP(64, [WIDTH] * (len(LAYERS) + 1), 10)


class Plain(nn.Sequential):
    """A model that every rank has to build as a whole."""

    def __init__(self) -> None:
        super().__init__(*make().children())


class Codes:
    """Stands for `bitsandbytes.functional`."""

    @staticmethod
    def quantize_4bit(weight: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
        assert options == {"quant_type": "nf4", "compress_statistics": True}
        codes = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)
        return codes, SimpleNamespace(shape=weight.shape, total=float(weight.sum()))


def loaded(kind: str, folder: Path) -> dict[str, Any]:
    """Return the bytes and values of a rank that reads the base of its adapters."""
    lora = {"match": LAYERS, "rank": 4, "quantize": "nf4"}
    config = config_with({f"train.lora.{key}": value for key, value in lora.items()})
    original = quantized._functional
    quantized._functional = Codes
    try:
        with Live() as live:
            model = spread(Plain if kind == "built" else make, config)
            if kind == "built":
                live.restart()
            released = sum(map(is_released, model.module.parameters()))
            found = start_from(model.module, open_weights(find_weights(folder)), all_used=True)
            quantize(model.module)
            peak, kept = live.peak, live.now()
    finally:
        quantized._functional = original
    layers = {plain_name(name): layer for name, layer in adapted(model.module)}
    assert all(isinstance(layer, FourBitLinear) for layer in layers.values())
    totals = {name: layer.quant_state.total for name, layer in layers.items()}  # type: ignore[attr-defined]
    adapters = [p.detach().clone() for n, p in model.module.named_parameters() if is_adapter(n)]
    others = model.module.state_dict()
    head = next(value for name, value in others.items() if plain_name(name) == "19.weight")
    return {
        "peak": peak,
        "kept": kept,
        "released": released,
        "initial": found.initial,
        "totals": totals,
        "adapters": adapters,
        "head": head,
    }


@pytest.mark.parametrize(("kind", "ranks"), [("by modules", 1), ("by modules", 2), ("built", 2)])
def test_a_rank_holds_one_layer_that_is_not_packed(kind: str, ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = make().state_dict()
    save_file(base, tmp_path / "model.safetensors")
    for found in run_ranks(loaded, ranks, kind, tmp_path):
        assert (found["released"], found["initial"]) == (len(LAYERS), [])
        assert found["totals"] == {n: float(base[f"{n}.weight"].sum()) for n in LAYERS}
        assert torch.equal(found["head"], base["19.weight"])
        # Other layers, adapters and their gradients in DDP's bucket, biases.
        small = 4 * (64 + 10 + 2 * 2 * 4 * len(LAYERS)) * WIDTH + LARGE // 8
        assert found["kept"] < len(LAYERS) * packed_bytes(WIDTH * WIDTH) + small
        # The layer, and what safetensors has read of its file.
        assert found["peak"] - found["kept"] < 2 * LARGE + small
        assert [tuple(value.shape) for value in found["adapters"]] == [
            (4, WIDTH),
            (WIDTH, 4),
        ] * len(LAYERS)
        assert found["adapters"][0].any()
