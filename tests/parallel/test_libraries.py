"""Unmodified models of five libraries train, are saved and go on in another layout."""

import functools
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from hpctrain.config.schema import Config, ParallelConfig, PrecisionConfig
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.results.trained_model import load_weights
from tests.bounds import EXACT, within
from tests.parallel.parity import Result, difference, either, spread, whole
from tests.ranks import run_ranks
from tests.steps import here, step_of

STEPS, SAVED = 3, 2
LAYOUTS = {"ddp": ParallelConfig(), "zero3": ParallelConfig(dp_replicate=1, dp_shard=-1)}
MODELS: dict[str, dict[str, Any]] = {
    # Complex parameters, and a state dict with an entry that is a dict of functions.
    "neuralop": {
        "_target_": "neuralop.models.FNO",
        "n_modes": [4, 4],
        "hidden_channels": 8,
        "in_channels": 1,
        "out_channels": 1,
        "n_layers": 3,
    },
    # Each layer is a ModuleList of ModuleLists, which have no forward function.
    "x_transformers": {
        "_target_": "x_transformers.TransformerWrapper",
        "num_tokens": 64,
        "max_seq_len": 17,
        "attn_layers": {"_target_": "x_transformers.Decoder", "dim": 32, "depth": 2, "heads": 2},
    },
    "monai": {
        "_target_": "monai.networks.nets.UNet",
        "spatial_dims": 2,
        "in_channels": 1,
        "out_channels": 1,
        "channels": [4, 8],
        "strides": [2],
        "num_res_units": 1,
    },
    "diffusers": {
        "_target_": "diffusers.UNet2DModel",
        "sample_size": 16,
        "in_channels": 1,
        "out_channels": 1,
        "layers_per_block": 1,
        "block_out_channels": [8, 16],
        "norm_num_groups": 4,
        "attention_head_dim": 4,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    },
    # Encoder and decoder share their embedding, and each has one bias for all its blocks.
    "transformers": {
        "_target_": "transformers.T5ForConditionalGeneration",
        "config": {
            "_target_": "transformers.T5Config",
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    },
}
# These take seconds to import, which the ranks and the test all do.
SLOW = [name for name in MODELS if name != "x_transformers"]


class MeanSquares:
    """A loss for each of the models: the mean square of what it returns, or of its error."""

    def __init__(self, library: str) -> None:
        self.library = library

    def __call__(self, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        image, tokens = batch["image"], batch["tokens"]
        if self.library == "x_transformers":
            errors = model(tokens).pow(2).flatten(1)
        elif self.library == "transformers":
            errors = model(tokens, decoder_input_ids=tokens).logits.pow(2).flatten(1)
        elif self.library == "diffusers":
            errors = (model(image, batch["time"]).sample - image).pow(2).flatten(1)
        else:
            errors = (model(image) - image.roll(1, -1)).pow(2).flatten(1)
        mask = batch["mask"]
        return {"loss": ((errors.mean(1) * mask).sum(), mask.sum())}


def train(library: str, layout: str, save: Path | None, loads: list[Path]) -> list[Result]:
    """Train from the start, or go on from each of the checkpoints."""
    return [one(library, layout, save, load) for load in loads or [None]]


def one(library: str, layout: str, save: Path | None, load: Path | None) -> Result:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    build = functools.partial(instantiate, "model", MODELS[library])
    parallel = LAYOUTS[layout] if size > 1 else ParallelConfig()
    model = spread(build, Config(parallel=parallel, precision=PrecisionConfig("fp64", "fp64")))
    optimizer = torch.optim.SGD(model.parameters, momentum=0.9)
    step = step_of(model, MeanSquares(library), optimizer, clip_norm=0.5)
    losses, norms = [], []
    checkpoints = Checkpointer(load or save or Path(), 2, here(), model, optimizer)
    if load:
        assert checkpoints.load_latest() == {"step": SAVED}
    for number in range(SAVED if load else 0, STEPS):
        draw = torch.Generator().manual_seed(number)
        whole_batch = {
            "image": torch.rand((8, 1, 16, 16), generator=draw),
            "tokens": torch.randint(0, 64, (8, 17), generator=draw),
            "time": torch.randint(0, 9, (8,), generator=draw),
            "mask": torch.arange(8) < 7,
        }
        rows = 8 // size
        step({name: value[rank * rows :][:rows] for name, value in whole_batch.items()}, 0.1)
        losses.append(step.totals.means()["loss"])
        norms.append(float(step.grad_norm))
        if save and number == SAVED - 1:
            checkpoints.save(SAVED, {"step": SAVED})
    return Result(losses, norms, whole(model))


@pytest.mark.parametrize("library", either(["x_transformers"], SLOW))
def test_trains_saves_and_goes_on(library: str, tmp_path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some libraries use what torch will remove
            importlib.import_module(library)
    except ImportError as error:
        pytest.skip(f"{library} cannot be imported: {error}")
    ((expected,),) = run_ranks(train, 1, library, "ddp", None, [])
    folders = {layout: tmp_path / layout for layout in LAYOUTS}
    for layout, folder in folders.items():
        folder.mkdir()
        for (result,) in run_ranks(train, 2, library, layout, folder, []):
            within(difference(result, expected), EXACT)
    rest = Result(expected.losses[SAVED:], expected.norms[SAVED:], expected.parameters)
    for layout in LAYOUTS:
        others = [folder for other, folder in folders.items() if other != layout]
        for (result,) in run_ranks(train, 2, library, layout, None, others):
            within(difference(result, rest), EXACT)
    # What `load_run(...).model()` does with a checkpoint.
    for folder in folders.values():
        model: Any = instantiate("model", MODELS[library])
        load_weights(model, folder / f"step-{SAVED:08d}")
        again: Any = instantiate("model", MODELS[library])
        load_weights(again, folders["ddp"] / f"step-{SAVED:08d}")
        for one_, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.allclose(one_, other, atol=1e-6)
