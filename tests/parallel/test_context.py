"""Context parallel gives the results of one process, and its ranks do the same amount of work."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hpctrain.config.rules.combinations import parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.data.shards.types import Batch
from hpctrain.engine.parallel.context import SequencePart, causal_mask
from hpctrain.engine.parallel.preparing.activation_checkpointing import _policy
from hpctrain.engine.supervised.step import Totals
from hpctrain.errors import ConfigError
from hpctrain.tasks import Classification, LanguageModel, on_part
from tests.parallel import parity
from tests.parallel.low_precision import FORMATS, check_near
from tests.parallel.parity import Cell, Cells, check_equal, results
from tests.ranks import run_ranks
from tests.steps import Watched

SHARD = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
SHARD_2 = {"parallel.dp_replicate": -1, "parallel.dp_shard": 2}
TWICE = {"train.accumulate": 2}


def cell(model: str, ranks: int, cp: int, tp: int = 1, **more: Any) -> Cell:
    keys = {"parallel.cp": cp, "parallel.tp": tp} | more.pop("keys", {})
    return Cell(model, ranks, tuple(keys.items()), **more)


COVERING = [
    cell("transformer", 2, 2, keys=TWICE),
    cell("gpt", 2, 2),
    cell("transformer", 4, 2, keys=SHARD | TWICE),
    cell("untied", 4, 2, keys=TWICE | {"parallel.pp": 2}),
]
MORE = [
    cell("gpt", 4, 4),
    cell("transformer", 4, 2, 2),
    cell("transformer", 4, 4, keys=TWICE),
    cell("transformer", 4, 4, keys={"parallel.sync": "every", "train.accumulate": 2}),
    cell("gpt", 4, 2, 2, keys=TWICE),
    cell("untied", 4, 2, 2, keys={"parallel.sequence_parallel": False}),
    cell("gpt", 4, 2, 2, keys={"parallel.loss_parallel": False}),
    cell("transformer", 4, 2, keys={"parallel.dp_replicate": 2}),
    cell("gpt", 4, 2, keys=SHARD),
    cell("untied", 4, 2, keys=SHARD | TWICE | {"parallel.zero": 1}),
    cell("untied", 4, 2, keys=SHARD | TWICE | {"parallel.zero": 2}),
    cell("gpt", 4, 2, keys=SHARD | {"parallel.fsdp.offload": True}),
    cell("transformer", 4, 2, keys=SHARD | {"parallel.fsdp.reshard_after_forward": 2}),
    cell("transformer", 4, 2, keys=SHARD | {"train.activation_checkpointing": "full"}),
    cell("gpt", 4, 2, keys={"train.activation_checkpointing": "full"}),
    cell("transformer", 4, 2, 2, keys={"train.activation_checkpointing": "selective"}),
    cell("gpt", 4, 2, keys=SHARD | {"train.activation_checkpointing": "selective"}),
    cell("gpt", 4, 2, keys={"parallel.pp": 2, "train.accumulate": 4}),
    cell("untied", 8, 2, 2, keys=TWICE | {"parallel.pp": 2}),
    cell("untied", 8, 2, keys=SHARD | {"parallel.pp": 2, "train.accumulate": 4}),
    cell("transformer", 8, 2, 2),
    cell("gpt", 8, 2, 2, keys=SHARD | TWICE),
    cell("transformer", 8, 4, keys=SHARD | TWICE),
    cell("transformer", 8, 2, keys=SHARD_2 | TWICE),
]


CELLS = Cells(COVERING, MORE)


@pytest.mark.parametrize("cell", CELLS.params, ids=str)
def test_equal_to_one_process(cell: Cell) -> None:
    check_equal(cell, CELLS[cell])


@pytest.mark.slow
def test_bf16_within_its_bound() -> None:
    one = cell("untied", 2, 2, keys=FORMATS["bf16"])
    (by_rank,) = results((one,)).values()
    check_near(by_rank[0], "untied", "bf16")


def evaluated(cp: int, tp: int) -> list[tuple[dict[str, float], int]]:
    """Return the means of an evaluation after a step, and the number of logits of this rank."""
    one = cell("transformer", cp * tp, cp, tp)
    training = parity.build(one)
    training.run(one, 1)
    task = training.step.task
    assert isinstance(task, LanguageModel)
    task._bytes = torch.arange(64) % 7  # of each token, as `bind` reads them
    answers = []
    for seed in (1, 2):  # the last rows of both batches are masked
        batch = parity.batch("transformer", seed)
        totals = Totals()
        totals.add(*training.model.evaluate(task, batch))
        totals.reduce(training.mesh)
        with torch.no_grad():
            logits = training.model.module(*task.inputs(batch))
        answers.append((totals.means(), logits.shape[1]))
    return answers


def test_evaluation_and_bits_per_byte() -> None:
    (expected,) = run_ranks(evaluated, 1, 1, 1)
    assert [sorted(means) for means, _ in expected] == [["bits_per_byte", "loss"]] * 2
    for by_rank in run_ranks(evaluated, 4, 2, 2):
        for (means, length), (theirs, whole) in zip(by_rank, expected, strict=True):
            assert means == pytest.approx(theirs, rel=1e-6)
            assert (length, whole) == (12, 24)


def attention(
    length: int, grouped: bool, documents: bool, dtype: torch.dtype
) -> list[tuple[float, float]]:
    """Return largest differences of the output and three gradients from those of all in float64.

    The second of each pair is that of torch's attention over all in `dtype`.
    """
    cp, rank = distributed.get_world_size(), distributed.get_rank()
    part = SequencePart(rank, cp, distributed.group.WORLD)
    shapes = [(2, 4, length, 8), *[(2, 2 if grouped else 4, length, 8)] * 2]
    whole = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    weights = torch.randn(shapes[0], dtype=dtype)
    numbers = (torch.rand(2, length) < 0.2).int().cumsum(1)
    mask, masks = None, None
    if documents:
        mask = (numbers[:, :, None] == numbers[:, None, :]).tril()[:, None]
        masks = part.masks(numbers)

    def of_all(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(
            *parts, mask, is_causal=not documents, enable_gqa=grouped
        )
        return [out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), parts)]

    theirs = of_all(whole)
    expected = of_all([x.detach().double().requires_grad_() for x in whole])
    own = [part.cut(x.detach(), 2).requires_grad_() for x in whole]
    out = part.attend(own[0], own[1], own[2], masks)
    (out * part.cut(weights, 2)).sum().backward()
    ours = [out, *(x.grad for x in own)]
    return [
        tuple(
            float((a - part.cut(truth, 2)).abs().max() / truth.abs().max())
            for a in (mine, part.cut(other, 2))
        )
        for mine, other, truth in zip(ours, theirs, expected, strict=True)
    ]


class LikeCuda:
    """A device that claims to be a GPU."""

    type = "cuda"


def test_the_mask_without_memory_within_selective_checkpointing() -> None:
    query, key, value = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    query.requires_grad_()
    expected = F.scaled_dot_product_attention(
        query, key, value, causal_mask(4, 12, torch.device("cpu"))
    )
    (theirs,) = torch.autograd.grad(expected.sum(), query)

    def attend(query: torch.Tensor) -> torch.Tensor:
        mask = causal_mask(4, 12, LikeCuda())  # type: ignore[arg-type]
        assert mask.numel() == 0
        return F.scaled_dot_product_attention(query, key, value, mask)

    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    out = checkpoint(attend, query, use_reentrant=False, context_fn=contexts)
    (ours,) = torch.autograd.grad(out.sum(), query)
    assert torch.allclose(out, expected)
    assert torch.allclose(ours, theirs)


def test_a_gpu_of_amd_has_a_plain_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash kernel of some builds for AMD takes the mask without memory for another one."""
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch, "ones", lambda *sizes, **_: torch.full(sizes, 1, dtype=torch.bool))
    mask = causal_mask(2, 4, LikeCuda())  # type: ignore[arg-type]
    assert mask.tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize("cp", [2, 3, 8])
def test_ranks_have_all_positions_and_do_the_same_work(cp: int) -> None:
    length = 48
    parts = [SequencePart(rank, cp, None) for rank in range(cp)]
    positions = [part.cut(torch.arange(length), 0) for part in parts]
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(length))
    # A query at position p sees p + 1 keys.
    seen = length * (length + 1) // 2
    assert [int((p + 1).sum()) for p in positions] == [seen // cp] * cp
    one_document = torch.zeros(3, length, dtype=torch.int32)
    for part, own in zip(parts, positions, strict=True):
        masks = part.masks(one_document)
        assert sum(int(mask.sum()) for mask in masks) == 3 * int((own + 1).sum())
        # The pairs that are computed are 1 + 1 / (2 * cp) times half of length^2 / cp.
        pairs = sum(mask.numel() for mask in masks)
        assert pairs == 3 * length**2 * (2 * cp + 1) // (4 * cp**2)


def test_masks_never_have_the_size_of_a_whole_mask() -> None:
    length, cp = 256, 4
    documents = (torch.arange(length) // 50)[None]
    made: list[Any] = []
    with Watched(lambda _, out: made.append(out)):
        masks = SequencePart(3, cp, None).masks(documents)
    assert [mask.shape for mask in masks] == [(1, 1, 32, 128), (1, 1, 32, 160)]
    sizes = [out.untyped_storage().nbytes() for out in made if isinstance(out, torch.Tensor)]
    assert max(sizes) == 32 * 160  # rather than 256 * 256


def wrong(cp: int, tp: int) -> str:
    one = cell("transformer", cp * tp, cp, tp)
    training = parity.build(one)
    batch: Batch = {n: x[:, :-2] if x.dim() == 2 else x for n, x in parity.batch("", 0).items()}
    with pytest.raises(ConfigError) as error:
        training.step(batch, 0.1)
    return str(error.value)


def test_a_wrong_length_in_training() -> None:
    for text in run_ranks(wrong, 2, 2, 1):
        assert "parallel.cp=2 needs 4 equal parts of the 22 positions of a sample: use 20" in text
    for text in run_ranks(wrong, 4, 2, 2):
        assert "parallel.cp=2 with parallel.tp=2 needs 4 equal parts of the 22 positions" in text


def test_other_tasks_and_models_are_refused() -> None:
    part = SequencePart(0, 2, None)
    with pytest.raises(
        ConfigError, match=r"task\._target_=hpctrain\.tasks\.classification\.Classification has no"
    ):
        on_part(Classification(), part)
    config = Config()
    config.model["_target_"] = "hpctrain.models.ConvNet"
    config.task["_target_"] = "hpctrain.tasks.Classification"
    assert list(parallel_problems(config, Degrees(2))) == []
    problems = list(parallel_problems(config, Degrees(cp=2)))
    assert [problem.partition(":")[0] for problem in problems] == [
        "parallel.cp=2 with model._target_=hpctrain.models.ConvNet",
        "parallel.cp=2 with task._target_=hpctrain.tasks.Classification",
    ]
    config.model["_target_"] = "hpctrain.models.Transformer"
    config.task["_target_"] = "hpctrain.tasks.LanguageModel"
    assert list(parallel_problems(config, Degrees(cp=2))) == []
