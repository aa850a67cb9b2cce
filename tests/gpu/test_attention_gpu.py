"""Attention on a GPU never makes all scores, and its parts under context parallel fit together."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hpctrain.engine.layers.attention import attend
from hpctrain.engine.parallel.context import SequencePart
from hpctrain.models import Transformer
from hpctrain.models.attention import Attention, Documents
from tests.gpu.device import CUDA, on_gpu

pytestmark = on_gpu
FUSED = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}
MATH = "aten::_scaled_dot_product_attention_math"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

each_dtype = pytest.mark.parametrize("compute", DTYPES)
grouped_or_not = pytest.mark.parametrize("kv_heads", [4, 16], ids=["grouped", "all heads"])
causal_or_documents = pytest.mark.parametrize(
    "documents", [False, True], ids=["causal", "documents"]
)


def same_document(rows: int, length: int) -> torch.Tensor:
    """Return the mask of documents of uneven lengths, bool (rows, 1, length, length)."""
    draw = torch.Generator().manual_seed(1)
    numbers = (torch.rand(rows, length, generator=draw) < 0.01).int().cumsum(1).to(CUDA)
    return (numbers[:, :, None] == numbers[:, None, :]).tril_()[:, None]


@each_dtype
@grouped_or_not
@causal_or_documents
def test_kernels_and_memory(compute: str, kv_heads: int, documents: bool) -> None:
    rows, length, dim, heads = 2, 4096, 512, 16
    torch.manual_seed(0)
    module = Attention(dim, heads, kv_heads, bias=False, std=0.02).to(CUDA)
    x = torch.randn(rows, length, dim, device=CUDA, requires_grad=True)
    masks = (same_document(rows, length),) if documents else None

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=compute == "bf16"):
            out = module(x, None, masks)
        out.float().square().sum().backward()

    step()  # makes the gradients and cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    names = {event.key for event in profiler.key_averages()}
    kernels = sorted(name for name in names if "::" not in name)
    assert names & FUSED, kernels
    assert MATH not in names, kernels
    scores = rows * heads * length**2 * 2  # bytes of all scores in 16 bits
    assert peak < scores / 2, f"{peak / 2**20:.0f} MiB, {kernels}"


@grouped_or_not
def test_documents_without_a_mask(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses and gradients are those with a mask, and no mask is made."""
    rows, length = 2, 1024
    torch.manual_seed(0)
    model = Transformer(64, 512, 2, 16, kv_heads).to(CUDA)
    tokens = torch.randint(0, 64, (rows, length), device=CUDA)
    documents = (torch.rand(rows, length, device=CUDA) < 0.01).int().cumsum(1)
    results = []
    for masked in (False, True):
        if masked:
            monkeypatch.setattr(Documents, "fit", lambda x, head_dim: False)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(tokens, documents)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            gradients = torch.autograd.grad(loss, [*model.parameters()])
        names = {event.key for event in profiler.key_averages()}
        assert ("torch_attn::_varlen_attn" in names) is not masked
        results.append((loss.item(), gradients))
    (loss, mine), (expected, theirs) = results
    assert loss == pytest.approx(expected, rel=1e-2)
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).norm() < 5e-2 * other.norm()


@each_dtype
@grouped_or_not
@causal_or_documents
@pytest.mark.parametrize("cp", [2, 4])
def test_every_rank_of_context_parallel(
    cp: int, compute: str, kv_heads: int, documents: bool
) -> None:
    """The outputs of all ranks, and the sums of their gradients, are those of the whole."""
    rows, length, width, dtype = 2, 512, 64, DTYPES[compute]
    draw = torch.Generator().manual_seed(0)
    shapes = [(rows, 16, length, width), *[(rows, kv_heads, length, width)] * 2]
    whole = [torch.randn(s, generator=draw).to(CUDA, dtype).requires_grad_() for s in shapes]
    weights = torch.randn(shapes[0], generator=draw).to(CUDA, dtype)
    mask, numbers = None, None
    if documents:
        mask = same_document(rows, length)
        # A position begins a document if it does not see the one before it.
        begins = ~mask[:, 0].diagonal(-1, 1, 2)
        numbers = torch.cat([mask.new_zeros(rows, 1), begins], 1).int().cumsum(1)
    expected = attend(whole[0], whole[1], whole[2], mask)
    theirs = torch.autograd.grad((expected * weights).sum(), whole)
    sums = [torch.zeros_like(gradient) for gradient in theirs]
    for rank in range(cp):
        part = SequencePart(rank, cp, None)
        masks = None if numbers is None else part.masks(numbers)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            out = part.attend_to_all(part.cut(whole[0], 2), whole[1], whole[2], masks)
        assert MATH not in {event.key for event in profiler.key_averages()}
        tolerance = 2e-2 if compute == "bf16" else 1e-4
        assert torch.allclose(out, part.cut(expected, 2), rtol=tolerance, atol=tolerance)
        own = torch.autograd.grad((out * part.cut(weights, 2)).sum(), whole)
        for total, gradient in zip(sums, own, strict=True):
            total += gradient
    for total, gradient in zip(sums, theirs, strict=True):
        assert (total - gradient).norm() < tolerance * gradient.norm()
