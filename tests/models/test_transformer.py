"""Tests of the Transformer: sizes, parity with other code, masks, rotation and initial weights."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.models import MLP, ConvNet, Transformer
from hpctrain.models.attention import Attention, rotary, rotate
from hpctrain.models.layers import Linear
from tests.conftest import ROOT

GPT2: dict[str, Any] = {
    "norm": "layer",
    "mlp": "gelu",
    "learned_positions": 24,
    "bias": True,
    "tied": True,
}


def small(**options: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**{"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, **options})


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2_124m", 124_439_808),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    config = yaml.safe_load(Path(ROOT, "conf", "model", f"{name}.yaml").read_text())
    assert config.pop("_target_") == "hpctrain.models.Transformer"
    with torch.device("meta"):
        model = Transformer(**config)
    assert sum(p.numel() for p in model.parameters()) == parameters


def hugging_face(names: dict[str, str], theirs: nn.Module, ours: Transformer) -> None:
    """Copy the weights of `theirs` to `ours`; `names` maps the names of our modules to theirs."""
    state = theirs.state_dict()
    found = {}
    for name in ours.state_dict():
        parts = name.split(".")
        layer = parts[1] if parts[0] == "layers" else ""
        inner = ".".join(parts[2 if layer else 0 : -1])
        found[name] = state[f"{names[inner].format(layer)}.{parts[-1]}"]
    ours.load_state_dict(found)


def test_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    ours = small(kv_heads=2, hidden=80, theta=500_000.0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    layer = "model.layers.{}."
    names = {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "attention_norm": layer + "input_layernorm",
        "mlp_norm": layer + "post_attention_layernorm",
        "attention.query": layer + "self_attn.q_proj",
        "attention.key": layer + "self_attn.k_proj",
        "attention.value": layer + "self_attn.v_proj",
        "attention.out": layer + "self_attn.o_proj",
        **{f"mlp.{name}": f"{layer}mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    for parameter in theirs.parameters():  # small weights would make attention uniform
        parameter.data *= 5
    hugging_face(names, theirs, ours)
    with torch.no_grad():
        assert torch.allclose(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


def test_gpt2_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    ours = small(**GPT2)
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=24)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data * 5 + 0.1 * torch.randn_like(parameter)
    # Their projections have the shape (in, out).
    state = {
        name: value.T if ".c_" in name and value.dim() == 2 else value
        for name, value in theirs.state_dict().items()
    }
    mine = {
        "embed.weight": state["transformer.wte.weight"],
        "head.weight": state["transformer.wte.weight"],
        "positions.weight": state["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        mine[f"norm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for i in range(2):
            here, there = f"layers.{i}.", f"transformer.h.{i}."
            mine[f"{here}attention_norm.{kind}"] = state[f"{there}ln_1.{kind}"]
            mine[f"{here}mlp_norm.{kind}"] = state[f"{there}ln_2.{kind}"]
            projections = state[f"{there}attn.c_attn.{kind}"].split(32)
            for name, value in zip(("query", "key", "value"), projections, strict=True):
                mine[f"{here}attention.{name}.{kind}"] = value
            mine[f"{here}attention.out.{kind}"] = state[f"{there}attn.c_proj.{kind}"]
            mine[f"{here}mlp.up.{kind}"] = state[f"{there}mlp.c_fc.{kind}"]
            mine[f"{here}mlp.down.{kind}"] = state[f"{there}mlp.c_proj.{kind}"]
    ours.load_state_dict(mine)
    with torch.no_grad():
        assert torch.allclose(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


def test_attention_written_out() -> None:
    """Query heads share key heads in order, and a token sees itself and the tokens before it."""
    torch.manual_seed(0)
    attention = Attention(32, 4, 2, bias=False, std=0.2)
    x = torch.randn(1, 6, 32)
    rotation = rotary(torch.arange(6)[None], 8, 100.0)
    heads = []
    for head in range(4):
        query = attention.query(x)[..., head * 8 : head * 8 + 8]
        shared = head // 2 * 8
        key = attention.key(x)[..., shared : shared + 8]
        value = attention.value(x)[..., shared : shared + 8]
        query, key = (rotate(each[:, None], rotation)[:, 0] for each in (query, key))
        scores = (query @ key.mT / math.sqrt(8)).masked_fill(
            torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf
        )
        heads.append(scores.softmax(-1) @ value)
    expected = attention.out(torch.cat(heads, -1))
    assert torch.allclose(attention(x, rotation, None), expected, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, GPT2])
def test_documents_are_separate(options: dict[str, Any]) -> None:
    model, row = small(**options), tokens(1, 12)
    ends = [0, 3, 4, 12]
    documents = torch.tensor([[0] * 3 + [1] + [2] * 8], dtype=torch.int32)
    packed = model(row, documents)
    separate = [model(row[:, a:b]) for a, b in pairwise(ends)]
    assert torch.allclose(packed, torch.cat(separate, 1), atol=1e-5)
    assert not torch.allclose(packed, model(row), atol=1e-2)
    assert torch.allclose(model(row, torch.zeros_like(documents)), model(row), atol=1e-5)


def test_initial_weights() -> None:
    model = Transformer(512, 128, 8, 4)
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.05)
    out = model.layers[0].attention.out
    assert isinstance(out, Linear)
    assert out.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    # Before training, the prediction is nearly uniform.
    loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())
    assert loss.item() == pytest.approx(math.log(512), rel=0.02)


MODELS: dict[str, Any] = {
    "llama": lambda: small(kv_heads=2),
    "gpt2": lambda: small(**GPT2),
    "mlp": lambda: MLP(16, [8, 8], 4),
    "conv": lambda: ConvNet(3, [8, 16], 4),
    "batch": lambda: ConvNet(3, [8, 16], 4, norm="batch"),
}


@pytest.mark.parametrize("name", MODELS)
def test_initialised_module_by_module_from_the_meta_device(name: str) -> None:
    """The order of the modules does not change the weights, as each module has its own seed."""
    with torch.device("meta"):
        models = [MODELS[name]() for _ in range(2)]
    for model, turn in zip(models, (1, -1), strict=True):
        model.to_empty(device="cpu")
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.fill_(-7)
        for path, module in list(model.named_modules())[::turn]:
            torch.manual_seed(len(path) if path != "head" else len("embed"))
            model.init_module(module)
    states = [model.state_dict() for model in models]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
        assert not (value == -7).any(), key
    # The distribution is that of a model that is built on the CPU.
    built = MODELS[name]().state_dict()
    for key, value in states[0].items():
        if value.numel() >= 128:
            assert value.std().item() == pytest.approx(built[key].std().item(), rel=0.35, abs=1e-9)
        elif "norm" in key:
            assert torch.equal(value, built[key]), key


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": 5}, "heads=5 does not divide dim=32"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4; 1, 2, 4 do"),
        ({"dim": 36, "heads": 4}, "36 / heads=4 = 9 elements"),
        ({"layers": 0}, "layers=0, heads=4"),
        ({"norm": "batch"}, "norm=batch: it is rms or layer"),
        ({"mlp": "relu"}, "mlp=relu: it is swiglu or gelu"),
    ],
)
def test_shapes_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small(**options)


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size=50: .* tokens from 0 to 50"):
        small()(torch.arange(51)[None])
    with pytest.raises(ConfigError, match=r"model\.learned_positions=24: .* 25 tokens"):
        small(**GPT2)(tokens(1, 25))
