"""Which kernel gets grouped heads and documents on a GPU.

There is no GPU here: tensors on the CPU claim to be on one, and the CPU computes the attention that
is asked for. tests/gpu/test_attention_gpu.py sees the kernels and their memory.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from hpctrain.engine.layers.attention import attend
from hpctrain.engine.parallel.context import SequencePart, causal_mask
from hpctrain.models import Transformer, attention
from hpctrain.models.attention import Documents
from tests.bounds import EXACT

LENGTH = 8
MASK = (torch.arange(LENGTH)[:, None] // 3 == torch.arange(LENGTH) // 3).tril()[None, None]


class Gpu(NamedTuple):
    """A device that claims to be a GPU."""

    type: str = "cuda"


class OnGpu(torch.Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    device = Gpu()  # type: ignore[assignment]


class Asked(TorchFunctionMode):
    """Records for each attention whether it is asked for with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.grouped.append(kwargs["enable_gqa"])
        return func(*args, **(kwargs or {}))


def heads(kv_heads: int, dtype: torch.dtype, head_dim: int = 16) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTH, head_dim), *[(2, kv_heads, LENGTH, head_dim)] * 2]
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "mask", "capability", "head_dim", "grouped"),
    [
        (torch.bfloat16, None, (8, 0), 16, True),
        (torch.float16, None, (9, 0), 192, True),
        (torch.bfloat16, MASK, (9, 0), 16, False),  # flash takes no mask
        (torch.float32, None, (9, 0), 16, False),  # nor fp32
        (torch.float32, MASK, (9, 0), 16, False),
        (torch.float16, None, (7, 5), 16, False),  # no flash on a T4
        (torch.bfloat16, None, (9, 0), 200, False),
    ],
    ids=["bf16", "fp16", "bf16-mask", "fp32", "fp32-mask", "fp16-old", "bf16-wide"],
)
def test_groups_only_where_the_flash_kernel_takes_them(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    mask: torch.Tensor | None,
    capability: tuple[int, int],
    head_dim: int,
    grouped: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query, key, value = heads(2, dtype, head_dim)
    expected = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, enable_gqa=True
    )
    with Asked() as asked:
        out = attend(*(x.as_subclass(OnGpu) for x in (query, key, value)), mask)
        whole = attend(*(x.as_subclass(OnGpu) for x in heads(4, dtype, head_dim)), mask)
        cpu = attend(query, key, value, mask)
    assert asked.grouped == [grouped, False, True]
    assert torch.allclose(out.as_subclass(torch.Tensor), expected, atol=1e-6 if grouped else 2e-2)
    assert torch.equal(cpu, expected), "the numbers of a CPU stay as they are"
    assert whole.shape == expected.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_divided_sequences(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    written = CausalBias._materialize
    monkeypatch.setattr(CausalBias, "_materialize", lambda mask, device: written(mask))
    query, key, value = heads(2, dtype)
    part = SequencePart(1, 2, None)
    expected = part.attend_to_all(part.cut(query, 2), key, value, None)
    with Asked() as asked:
        out = part.attend_to_all(
            part.cut(query, 2).as_subclass(OnGpu),
            *(x.as_subclass(OnGpu) for x in (key, value)),
            None,
        )
    assert asked.grouped[:1] == [dtype == torch.bfloat16]
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert torch.allclose(out.as_subclass(torch.Tensor), expected, atol=tolerance)
    assert causal_mask(2, 4, Gpu()).numel() == 0  # type: ignore[arg-type]


FIT = (torch.bfloat16, 16, (8, 0), None, None)  # dtype, head_dim, capability, autocast, ROCm


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        (FIT, True),
        ((torch.float32, 192, (9, 0), torch.float16, None), True),
        ((torch.float32, 16, (9, 0), None, None), False),
        ((torch.bfloat16, 12, (9, 0), None, None), False),
        ((torch.bfloat16, 16, (7, 5), None, None), False),
        ((torch.bfloat16, 16, (9, 4), None, "7.0"), False),
    ],
)
def test_documents_go_to_the_flash_kernel_where_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, given: tuple[Any, ...], fits: bool
) -> None:
    dtype, head_dim, capability, autocast, rocm = given
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: autocast)
    x = torch.zeros(1, dtype=dtype)
    assert Documents.fit(x.as_subclass(OnGpu), head_dim) is fits
    assert not Documents.fit(x, head_dim)


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> torch.Tensor:
    """Stand for torch's kernel, which no CPU has: attention within each document."""
    assert bounds_q is bounds_k
    assert bounds_q.dtype == torch.int32
    assert options.get("window_size") == (-1, 0) or options["is_causal"]
    sizes = bounds_q.diff().tolist()
    assert max(sizes) == max_q == max_k
    parts = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (query, key, value)), strict=True)
    grouped = key.shape[1] < query.shape[1]
    mixed = [F.scaled_dot_product_attention(*p, is_causal=True, enable_gqa=grouped) for p in parts]
    return torch.cat(mixed, 1).transpose(0, 1)


@pytest.mark.parametrize("knows", [True, False], ids=["groups", "no groups"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_documents_without_a_mask(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, knows: bool
) -> None:
    documents = torch.tensor([[0] * 3 + [1] + [2] * 8, [0] * 12], dtype=torch.int32)
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.set_default_dtype(torch.float64)
    model = Transformer(50, 32, 2, 4, kv_heads)
    expected = model(tokens, documents)
    gradients = torch.autograd.grad(expected.square().sum(), [*model.parameters()])
    bounds = []
    monkeypatch.setattr(Documents, "fit", lambda x, head_dim: True)
    monkeypatch.setattr(attention, "varlen_attn", one_by_one)
    if not knows:  # torch 2.10 and 2.11
        monkeypatch.setattr(attention, "_KNOWN", {})
    of = Documents.of
    monkeypatch.setattr(Documents, "of", lambda x: bounds.append(of(x)) or bounds[-1])
    found = model(tokens, documents)
    assert [(b.bounds.tolist(), b.longest) for b in bounds] == [([0, 3, 4, 12, 24], 12)]
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    mine = torch.autograd.grad(found.square().sum(), [*model.parameters()])
    for one, other in zip(mine, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=EXACT)


def test_torch_takes_the_arguments_of_documents() -> None:
    """Tensors without values stand for those of a GPU: torch checks all but the numbers."""
    with FakeTensorMode(), torch.no_grad():
        shapes = ((2, 4, 12, 16), *[(2, 2, 12, 16)] * 2)
        heads = [torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
        bounds = torch.empty(4, dtype=torch.int32, device="cuda")
        out = attention.attend_within(heads[0], heads[1], heads[2], Documents(bounds, 8))
    assert (out.shape, out.dtype) == ((2, 4, 12, 16), torch.bfloat16)
