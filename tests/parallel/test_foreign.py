"""Unmodified models of transformers and timm, given by `_target_`, train alike when sharded."""

import functools
import inspect
from typing import Any

import pytest
import torch

from hpctrain.config.schema import Config, ParallelConfig, PrecisionConfig
from hpctrain.config.schema.parallel import PipelineConfig
from hpctrain.data.shards.types import Batch
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.parallel.preparing.blocks import find_blocks
from hpctrain.engine.tasks.task import check_arguments
from hpctrain.errors import ConfigError
from hpctrain.tasks import Classification, LanguageModel, SplitTask, Sums
from tests.bounds import EXACT, within
from tests.parallel.parity import Result, difference, spread, whole
from tests.ranks import run_ranks
from tests.steps import step_of

LLAMA = {
    "_target_": "transformers.LlamaForCausalLM",
    "config": {
        "_target_": "transformers.LlamaConfig",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
GPT2 = {
    "_target_": "transformers.GPT2LMHeadModel",
    "config": {
        "_target_": "transformers.GPT2Config",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
VIT = {
    "_target_": "timm.create_model",
    "model_name": "vit_tiny_patch16_224",
    "img_size": 16,
    "patch_size": 8,
    "depth": 3,
    "embed_dim": 32,
    "num_heads": 2,
    "num_classes": 10,
    "in_chans": 1,
}
# LayerDrop leaves out every layer. Where a layer finds that FSDP has divided it, it is kept.
WAV2VEC2 = {
    "_target_": "transformers.Wav2Vec2ForCTC",
    "config": {
        "_target_": "transformers.Wav2Vec2Config",
        "vocab_size": 12,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "conv_dim": [8, 8],
        "conv_kernel": [4, 4],
        "conv_stride": [4, 4],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "layerdrop": 1.0,
        "mask_time_prob": 0.0,
        "hidden_dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "final_dropout": 0.0,
    },
}


class Sounds(SplitTask):
    """The mean square of the logits of each row, whose sound is made of its tokens."""

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (batch["tokens"].double().sin().repeat_interleave(8, 1),)

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        rows = (outputs.logits**2).mean((1, 2)) * batch["mask"]
        return {"loss": (rows.sum(), batch["mask"].sum())}


MODELS: dict[str, tuple[Any, str]] = {
    "llama": (LLAMA, "model.layers."),
    "gpt2": (GPT2, "transformer.h."),
    "vit": (VIT, "blocks."),
}


def train(name: str, parallel: ParallelConfig, accumulate: int = 1) -> Result:
    config = Config(parallel=parallel, precision=PrecisionConfig("fp64", "fp64"))
    config.train.accumulate = accumulate
    task = {"vit": Classification, "wav2vec2": Sounds}.get(name, LanguageModel)()
    node = WAV2VEC2 if name == "wav2vec2" else MODELS[name][0]
    build = functools.partial(instantiate, "model", node)
    model = spread(build, config, loss_parallel=task.loss_parallel)
    optimizer = torch.optim.SGD(model.parameters, lr=0.1, momentum=0.9)
    step = step_of(model, task, optimizer, clip_norm=0.5)
    losses, norms = [], []
    for number in range(4):
        draw = torch.Generator().manual_seed(number)
        batch = {
            "image": torch.rand((8, 1, 16, 16), generator=draw),
            "label": torch.randint(0, 10, (8,), generator=draw),
            "tokens": torch.randint(0, 64, (8, 17), generator=draw),
            "mask": torch.arange(8) < 7,
        }
        rows, rank = 8 // model.mesh.dp_size, model.mesh.dp_rank
        step({key: value[rank * rows :][:rows] for key, value in batch.items()}, 0.1)
        losses.append(step.totals.means()["loss"])
        norms.append(float(step.grad_norm))
    return Result(losses, norms, whole(model))


@functools.cache
def alone(name: str) -> Result:
    """Return the result of the training on one process, made once per test process."""
    (answer,) = run_ranks(train, 1, name, ParallelConfig())
    result: Result = answer
    return result


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    """The name of a model; the test is skipped where the model's package cannot be imported."""
    if request.param == "vit":
        try:
            import timm  # noqa: F401
        except (ImportError, RuntimeError) as error:  # torchvision may not fit torch
            pytest.skip(f"timm cannot be imported: {error}")
    return str(request.param)


def check(name: str, ranks: int, parallel: ParallelConfig, accumulate: int = 1) -> None:
    for result in run_ranks(train, ranks, name, parallel, accumulate):
        within(difference(result, alone(name)), EXACT)


def test_equal_to_one_process(name: str) -> None:
    for parallel in (ParallelConfig(), ParallelConfig(dp_replicate=1, dp_shard=-1)):
        check(name, 2, parallel)


def test_dropped_layers_stay_dropped() -> None:
    check("wav2vec2", 2, ParallelConfig(dp_replicate=1, dp_shard=2, zero=3))


def test_a_pipeline_follows_the_plan_of_transformers() -> None:
    check("llama", 2, ParallelConfig(dp_replicate=1, pp=2), 2)


@pytest.mark.slow
def test_documents_are_no_attention_mask() -> None:
    model = instantiate("model", LLAMA)
    names = [*inspect.signature(model.forward).parameters]
    with pytest.raises(ConfigError, match=r"forward\(input_ids, attention_mask, .* has att"):
        check_arguments(names, LanguageModel(documents=True).arguments)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zb"])
def test_stages_may_return_views(schedule: str) -> None:
    pipeline = PipelineConfig(schedule=schedule)
    check("llama", 2, ParallelConfig(dp_replicate=1, pp=2, pipeline=pipeline), 4)


@pytest.mark.slow
def test_the_tensor_plan_of_transformers() -> None:
    check("llama", 2, ParallelConfig(tp=2))
    check("llama", 4, ParallelConfig(tp=2, dp_replicate=1, dp_shard=2))


def test_blocks_are_found(name: str) -> None:
    node, prefix = MODELS[name]
    with torch.device("meta"):
        blocks = find_blocks(instantiate("model", node), [])
    assert len(blocks) > 2
    assert [name for name, _ in blocks] == [f"{prefix}{i}" for i in range(len(blocks))]
