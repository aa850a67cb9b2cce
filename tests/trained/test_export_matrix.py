"""Exported models compute what the trained ones do: transformers and peft read them back."""

import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.checkpoint.starting_point import start_from
from hpctrain.checkpoint.stored_weights import open_weights
from hpctrain.checkpoint.weight_files import find_weights
from hpctrain.config.schema import Config
from hpctrain.distributed.ranks import RankInfo
from hpctrain.job.building.make import make
from hpctrain.job.building.trained_model import trained_model
from hpctrain.trained.exporter import Exporter
from tests.parallel.parity import MODELS, TASKS, Cell, build
from tests.ranks import run_ranks
from tests.trained.test_export import GPT2, LLAMA

ZERO3 = (("parallel.dp_replicate", 1), ("parallel.dp_shard", -1))
LAYOUTS: dict[str, tuple[int, tuple[tuple[str, Any], ...]]] = {
    "one": (1, ()),
    "zero3": (2, ZERO3),
    "tp": (2, (("parallel.tp", 2),)),
    "pp": (2, (("parallel.pp", 2), ("train.accumulate", 2))),
}
HF_LLAMA: dict[str, Any] = {
    "_target_": "transformers.LlamaConfig",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HF_GPT2: dict[str, Any] = {
    "_target_": "transformers.GPT2Config",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_pdrop": 0,
    "embd_pdrop": 0,
    "resid_pdrop": 0,
}


class Family(NamedTuple):
    """A class of models: its config, whether it is tied, and the names of some parts.

    Attributes:
        tied: The node of a model whose head has the weight of its embedding.
        untied: The node of a model with two weights.
        query: A pattern of linear layers.
        bias: A pattern of biases of these layers; "" if they have none.
        embed: The name of the embedding.
        norm: The name of the last norm.
        head: The name of the head.
    """

    tied: dict[str, Any]
    untied: dict[str, Any]
    query: str
    bias: str
    embed: str
    norm: str
    head: str


def _hf(kind: str, config: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {"_target_": f"transformers.{kind}", "config": config | {"tie_word_embeddings": tied}}


FAMILIES = {
    "own llama": Family(
        LLAMA | {"tied": True}, LLAMA, "*.query", "", "embed.weight", "norm.weight", "head"
    ),
    "own gpt2": Family(
        GPT2, GPT2 | {"tied": False}, "*.query", "*.query.bias", "embed.weight", "norm.bias", "head"
    ),
    "hf llama": Family(
        _hf("LlamaForCausalLM", HF_LLAMA, tied=True),
        _hf("LlamaForCausalLM", HF_LLAMA, tied=False),
        *("*.q_proj", "", "*embed_tokens*", "model.norm.weight", "lm_head"),
    ),
    "hf gpt2": Family(
        _hf("GPT2LMHeadModel", HF_GPT2, tied=True),
        _hf("GPT2LMHeadModel", HF_GPT2, tied=False),
        *("*.c_attn", "*.c_attn.bias", "*wte*", "transformer.ln_f.bias", "lm_head"),
    ),
}
WHAT = ("full", "elsewhere", "head", "also embed", "also head", "also norm", "also bias", "both")
TOKENS = torch.arange(40).view(2, 20) % 61


def lora_of(family: Family, what: str) -> tuple[list[str], list[str]]:
    """Return the patterns of adapters, and those of parameters that are trained as well."""
    match = {
        "full": [],
        "head": [family.query, family.head],
        "both": [family.query, family.head],
    }.get(what, [family.query])
    also = {
        "also embed": [family.embed],
        "also head": [f"{family.head}.weight"],
        "also norm": [family.norm],
        "also bias": [family.bias, family.norm] if family.bias else [],
        "both": [family.embed],
    }.get(what, [])
    return match, also


def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits of the fixed tokens, float32 (2, 20, 64)."""
    with torch.no_grad():
        found = model.eval()(TOKENS)
    found = getattr(found, "logits", found)
    return found.full_tensor() if isinstance(found, DTensor) else found


def train(
    node: dict[str, Any], keys: tuple[tuple[str, Any], ...], folder: Path, base: Path, digest: str
) -> torch.Tensor | None:
    """Save a checkpoint after a step from the base; return what the trained model computes."""
    MODELS["it"], TASKS["it"] = partial(make, "model", node), TASKS["gpt"]
    rank, size = distributed.get_rank(), distributed.get_world_size()
    cell = Cell("it", size, keys)
    training = build(cell)
    model = training.model
    stages = model.mesh.pp_group if model.mesh.degrees.pp > 1 else None
    start_from(model.module, open_weights(find_weights(base)), (), (), stages)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith("lora_B"):
                nn.init.normal_(parameter, std=0.1)
            elif parameter.requires_grad:
                parameter.mul_(1.1)
    training.run(cell, 1)
    ranks = RankInfo("test", rank, rank, 0, size, size, 1, "localhost", 1)
    saver = Checkpointer(folder, 2, ranks, model, training.step.optimizer, base=digest)
    saver.save(1, {"step": 1})
    return None if stages is not None else logits(model.module)


def check(name: str, what: str, layout: str, folder: Path, *, tied: bool, stored: str = "") -> None:
    """Train a cell of the matrix, export it in each way, and compare what is read back.

    Args:
        name: The family.
        what: What is trained.
        layout: The ranks.
        folder: An empty one.
        tied: Whether the head has the weight of the embedding.
        stored: The name of the shared weight in the base; "" is the usual one.
    """
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    family = FAMILIES[name]
    node = family.tied if tied else family.untied
    match, also = lora_of(family, what)
    torch.manual_seed(1)
    start = make("model", node)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    kept = {n: v.clone() for n, v in start.state_dict().items()}
    if tied:
        head = f"{family.head}.weight"
        first = next(n for n, p in start.named_parameters() if p is start.get_parameter(head))
        del kept[first if stored == head else head]
    save_file(kept, folder / "base.safetensors", {"format": "pt"})
    config = Config(model=node)
    digest = ""
    if match:
        config.train.lora.match, config.train.lora.rank = match, 4
        config.train.lora.also = also
        config.checkpoint.init_from = str(folder / "base.safetensors")
        digest = find_weights(folder / "base.safetensors").digest()
        config.checkpoint.init_digest = digest
    size, keys = LAYOUTS[layout]
    if match:
        lora = {"match": tuple(match), "rank": 4, "also": tuple(also)}
        keys += tuple((f"train.lora.{key}", value) for key, value in lora.items())
    made = run_ranks(train, size, node, keys, folder, folder / "base.safetensors", digest)
    checkpoint = folder / "step-00000001"
    ours = logits(trained_model(config, checkpoint))
    for theirs in made:
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    before = logits(start)
    assert not torch.allclose(ours, before, atol=1e-3)
    (folder / "merged").mkdir()
    Exporter(config, checkpoint, merge=bool(match)).write(
        folder / "merged", 10**9, lambda name: None
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
    torch.testing.assert_close(logits(merged), ours, rtol=1e-4, atol=1e-5)
    if not match:
        return
    (folder / "adapters").mkdir()
    Exporter(config, checkpoint).write(folder / "adapters", 10**9, lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(start, folder / "adapters")
        torch.testing.assert_close(logits(adapted), ours, rtol=1e-4, atol=1e-5)


CELLS = [
    pytest.param(
        name, tied, what, layout, id=f"{name}-{'tied' if tied else 'untied'}-{what}-{layout}"
    )
    for name, tied, what, layout in itertools.product(
        FAMILIES, (True, False), WHAT, ("one", "zero3", "tp", "pp")
    )
    if (what != "also bias" or FAMILIES[name].bias)
    and (layout != "pp" or not tied)
    and (layout in ("one", "zero3") or name.startswith("own"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tied", "what", "layout"), CELLS)
def test_every_export_is_the_trained_model(
    name: str, tied: bool, what: str, layout: str, tmp_path: Path
) -> None:
    check(name, what, layout, tmp_path, tied=tied)
