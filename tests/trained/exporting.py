"""Models that are trained a little, exported, and read back by transformers and peft."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import Config, LoRAConfig, PrecisionConfig
from hpctrain.config.sections import ModelSections
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.checkpoint.starting_point import start_from
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.engine.layers.lora import add_adapters, freeze_base
from hpctrain.errors import ConfigError
from hpctrain.results.exporting.exporter import Exporter
from hpctrain.results.trained_model import trained_model
from hpctrain.runs.checkpoints.weight_files import find_weights
from tests.bounds import EXACT, within
from tests.parallel.parity import MODELS, TASKS, Cell, build
from tests.ranks import run_ranks
from tests.steps import save_alone

FP64 = PrecisionConfig("fp64", "fp64")
TRANSFORMER = "hpctrain.models.Transformer"
LLAMA: dict[str, Any] = {
    "_target_": TRANSFORMER,
    "vocab_size": 64,
    "dim": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
}
GPT2: dict[str, Any] = {
    "_target_": TRANSFORMER,
    "vocab_size": 64,
    "dim": 32,
    "layers": 4,
    "heads": 4,
    "norm": "layer",
    "mlp": "gelu",
    "learned_positions": 24,
    "bias": True,
    "tied": True,
}
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
    """A class of models: two nodes of it, and the names of some parts."""

    tied: dict[str, Any]  # its head has the weight of its embedding
    untied: dict[str, Any]
    query: str  # a pattern of linear layers
    bias: list[str]  # a pattern of biases of these layers, if they have some
    embed: str
    norm: str  # the last one
    head: str


def _hf(kind: str, config: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {"_target_": f"transformers.{kind}", "config": config | {"tie_word_embeddings": tied}}


FAMILIES = {
    "own llama": Family(
        LLAMA | {"tied": True}, LLAMA, "*.query", [], "embed.weight", "norm.weight", "head"
    ),
    "own gpt2": Family(
        GPT2,
        GPT2 | {"tied": False},
        "*.query",
        ["*.query.bias"],
        "embed.weight",
        "norm.bias",
        "head",
    ),
    "hf llama": Family(
        _hf("LlamaForCausalLM", HF_LLAMA, tied=True),
        _hf("LlamaForCausalLM", HF_LLAMA, tied=False),
        *("*.q_proj", [], "*embed_tokens*", "model.norm.weight", "lm_head"),
    ),
    "hf gpt2": Family(
        _hf("GPT2LMHeadModel", HF_GPT2, tied=True),
        _hf("GPT2LMHeadModel", HF_GPT2, tied=False),
        *("*.c_attn", ["*.c_attn.bias"], "*wte*", "transformer.ln_f.bias", "lm_head"),
    ),
}
WHAT = ("full", "elsewhere", "head", "also embed", "also norm")
TOKENS = torch.arange(40).view(2, 20) % 61


def lora_of(family: Family, what: str) -> tuple[list[str], list[str]]:
    """Return the patterns of adapters, and those of parameters that are trained as well."""
    match = {"full": [], "head": [family.query, family.head]}.get(what, [family.query])
    also = {"also embed": [family.embed], "also norm": [family.norm, *family.bias]}.get(what, [])
    return match, also


def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits of the fixed tokens, float64 (2, 20, 64)."""
    with torch.no_grad():
        found = model.eval()(TOKENS)
    found = getattr(found, "logits", found)
    return found.full_tensor() if isinstance(found, DTensor) else found


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def save(
    node: dict[str, Any],
    keys: tuple[tuple[str, Any], ...],
    folder: Path,
    digest: str = "",
    base: Path | None = None,
) -> torch.Tensor | None:
    """Save a checkpoint after one step; with the digest of a base, one of adapters.

    With a base the model starts from it, and what the trained one computes is returned.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    MODELS["it"], TASKS["it"] = partial(instantiate, "model", node), TASKS["gpt"]
    rank, size = distributed.get_rank(), distributed.get_world_size()
    cell = Cell("it", size, keys)
    training = build(cell)
    model = training.model
    stages = model.mesh.pp_group if model.mesh.degrees.pp > 1 else None
    if base is not None:
        start_from(model.module, open_weights(find_weights(base)), (), (), stages)
        torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith("lora_B"):
                nn.init.normal_(parameter, std=0.1)
            elif base is not None and parameter.requires_grad:
                parameter.mul_(1.1)
    training.run(cell, 1)
    ranks = RankInfo("test", rank, rank, 0, size, size, 1, "localhost", 1)
    saver = Checkpointer(folder, 2, ranks, model, training.step.optimizer, base=digest)
    saver.save(1, {"step": 1})
    return None if base is None or stages is not None else logits(model.module)


def check(
    name: str, what: str, layout: str, folder: Path, *, tied: bool, stored: str = ""
) -> float:
    """Train a cell of the matrix, export it in each way, and compare what is read back.

    `stored` is the name of the shared weight in the base; "" is the usual one. Returns the largest
    relative difference of a logit.
    """
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    node = family.tied if tied else family.untied
    match, also = lora_of(family, what)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    start = instantiate("model", node)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    kept = {n: v.clone() for n, v in start.state_dict().items()}
    if tied:
        head = f"{family.head}.weight"
        first = next(n for n, p in start.named_parameters() if p is start.get_parameter(head))
        del kept[first if stored == head else head]
    save_file(kept, folder / "base.safetensors", {"format": "pt"})
    config = Config(model=node, precision=FP64)
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
    made = run_ranks(save, size, node, keys, folder, digest, folder / "base.safetensors")
    checkpoint = folder / "step-00000001"
    ours = logits(trained_model(ModelSections.of(config), checkpoint))
    for theirs in made:
        if theirs is not None:
            within([apart(theirs, ours)], EXACT)
    assert apart(logits(start), ours) > 1e-3
    parted = tied and family.head in match  # the adapter belongs to one of two names
    return read_back(config, checkpoint, ours, start, folder, merges=not parted)


def read_back(
    config: Config,
    checkpoint: Path,
    ours: torch.Tensor,
    start: nn.Module,
    folder: Path,
    *,
    merges: bool = True,
) -> float:
    """Export a checkpoint in each way, and compare what transformers and peft read back.

    `ours` are the logits of the trained model, and `start` is the one before the training, which is
    changed. Unless it `merges`, that is refused. Returns the largest relative difference.
    """
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    lora, found = bool(config.train.lora.patterns), list[float]()
    llama = config.model["_target_"] == TRANSFORMER and config.model.get("norm") != "layer"
    if merges:
        (folder / "merged").mkdir()
        Exporter(ModelSections.of(config), checkpoint, merge=lora).write(
            folder / "merged", 10**9, lambda name: None
        )
        if llama or config.model["_target_"] != TRANSFORMER:
            merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
        else:
            merged = instantiate("model", config.model)
            start_from(merged, open_weights(find_weights(folder / "merged")), all_used=True)
        found.append(apart(logits(merged), ours))
        # The Llama of transformers computes norms and angles in float32.
        within(found, 1e-5 if llama else EXACT)
    else:
        with pytest.raises(ConfigError, match=r"--merge: .* are one parameter of this model"):
            Exporter(ModelSections.of(config), checkpoint, merge=True)
    if config.train.lora.also:
        with pytest.raises(ConfigError, match=r"train\.lora\.also=.*: export the merged weights"):
            Exporter(ModelSections.of(config), checkpoint)
    elif lora:
        (folder / "adapters").mkdir()
        Exporter(ModelSections.of(config), checkpoint).write(
            folder / "adapters", 10**9, lambda name: None
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapters = peft.PeftModel.from_pretrained(start, folder / "adapters")
        found.append(apart(logits(adapters), ours))
        within(found[-1:], EXACT)
    return max(found)


class Block(nn.Module):
    """A layer, and a parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.fc = nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 8) to (batch, 8)."""
        return self.fc(x * self.gain).relu()  # type: ignore[no-any-return]


class Odd(nn.Module):
    """A model with what peft has no words for, or no short ones; `tied`: two layers are one."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.first = nn.Linear(8, 8)
        self.block = Block()
        self.norm, self.last_norm = nn.BatchNorm1d(8), nn.LayerNorm(8)
        self.again = self.block
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
        self.fc = nn.Linear(8, 8)
        self.same = self.deep[0]
        if tied:
            self.fc.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 8) to (batch, 8)."""
        x = self.block(self.norm(self.first(x) * self.scale))
        return self.fc(self.same(self.deep(self.last_norm(self.again(x)))))  # type: ignore[no-any-return]


def adapted(
    node: dict[str, Any], match: list[str], also: list[str], folder: Path
) -> tuple[Config, nn.Module, nn.Module]:
    """Save adapters without a training; return a config, the model that has them, and its base.

    The checkpoint is `folder / "step"`.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    config = Config(model=node, precision=FP64)
    config.train.lora = LoRAConfig(match=match, rank=2, also=also)
    base, trained = instantiate("model", node), instantiate("model", node)
    kept = {n: v.clone() for n, v in base.state_dict().items()}
    trained.load_state_dict(kept)
    save_file(kept, folder / "base.safetensors")
    config.checkpoint.init_from = str(folder / "base.safetensors")
    config.checkpoint.init_digest = find_weights(folder / "base.safetensors").digest()
    add_adapters(trained, match, 2, config.train.lora.alpha)
    freeze_base(trained, also)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.rand_like(parameter))
        for name, buffer in trained.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.5)
    named = trained.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    held = {name: v for name, v in trained.state_dict().items() if name not in frozen}
    save_alone({"model": held}, folder / "step", config.checkpoint.init_digest)
    return config, trained.eval(), base.eval()


def odd(*, tied: bool = False) -> dict[str, Any]:
    """Return the node of an odd model."""
    return {"_target_": f"{__name__}.Odd", "tied": tied}
