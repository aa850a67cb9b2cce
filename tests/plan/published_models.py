"""The models of the published runs, on the meta device.

Sizes are those of the papers and of the configurations at Hugging Face. `wide` stands for models
whose heads are wider than dim / heads (Qwen3, GPT-OSS), and `adapted` for LoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hpctrain.config.schema import LoRAConfig
from hpctrain.engine.layers.lora import add_adapters, freeze_base
from hpctrain.models import Transformer
from hpctrain.models.layers import Linear
from hpctrain.tasks import LanguageModel

Build = Callable[[], nn.Module]


def llama(
    dim: int, layers: int, heads: int, kv: int, hidden: int, words: int, **more: Any
) -> Build:
    return partial(Transformer, words, dim, layers, heads, kv, hidden, **more)


def gpt(dim: int, layers: int, heads: int, words: int = 50368) -> Build:
    return partial(Transformer, words, dim, layers, heads, norm="layer", mlp="gelu", tied=True)


def mixture(sizes: tuple[int, int, int, int, int, int], experts: int, used: int) -> Build:
    """Sizes are dim, layers, heads, kv heads, width of an expert, and words."""
    return llama(*sizes, experts=experts, experts_per_token=used, expert_scores="softmax")


def wide(build: Build, heads: int, kv: int, head: int) -> nn.Module:
    model: Any = build()
    for layer in model.layers:
        own = layer.attention
        dim, own.head_dim = own.query.in_features, head
        own.query, own.out = Linear(dim, heads * head, False), Linear(heads * head, dim, False)
        own.key, own.value = (Linear(dim, kv * head, False) for _ in range(2))
    model.head_dim = head
    return model


def adapted(build: Build, config: LoRAConfig) -> nn.Module:
    model = build()
    add_adapters(model, config.patterns, config.rank, config.alpha, config.dropout)
    freeze_base(model, [])
    return model


class _Kept(torch.autograd.Function):
    """Holds a tensor until the loss is forgotten, as the variable of a training loop does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.kept = kept.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Whole(LanguageModel):
    """The loss of all logits at once, which the loop keeps, in their format: no autocast."""

    def _losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        return _Kept.apply(losses, logits)


class Float32(LanguageModel):
    """The loss of all logits at once, in float32."""

    def _losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.float(), targets, reduction="none")


class Fused(LanguageModel):
    """The loss as torch.compile fuses it: nothing is kept but the logits and their gradients."""

    def _losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return logits.select(-1, 0).float()


LOSSES: dict[str, Callable[[], LanguageModel]] = {
    "whole": Whole,
    "float32": Float32,
    "fused": Fused,
}


class Bottleneck(nn.Module):
    """A block of a ResNet (He et al. 2015); with groups, of a ResNeXt (Xie et al. 2017)."""

    def __init__(self, wide_in: int, inner: int, out: int, stride: int, groups: int) -> None:
        super().__init__()
        sizes = (
            (wide_in, inner, 1, 1, 1),
            (inner, inner, 3, stride, groups),
            (inner, out, 1, 1, 1),
        )
        parts: list[nn.Module] = []
        for a, b, kernel, step, group in sizes:
            conv = nn.Conv2d(a, b, kernel, step, kernel // 2, groups=group, bias=False)
            parts += [conv, nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.main = nn.Sequential(*parts[:-1])
        whole = stride == 1 and wide_in == out
        skip = nn.Conv2d(wide_in, out, 1, stride, bias=False)
        self.skip = nn.Identity() if whole else nn.Sequential(skip, nn.BatchNorm2d(out))
        self.last = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.main(x) + self.skip(x))


def resnet(counts: tuple[int, ...], groups: int = 1, width: int = 64) -> nn.Module:
    first = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    parts: list[nn.Module] = [first, nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    parts.append(nn.MaxPool2d(3, 2, 1))
    before = 64
    for stage, count in enumerate(counts):
        inner, out = width * 2**stage, 256 * 2**stage
        for number in range(count):
            stride = 2 if stage and not number else 1
            parts.append(Bottleneck(before, inner, out, stride, groups))
            before = out
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def channels_last(counts: tuple[int, ...], groups: int = 1, width: int = 64) -> nn.Module:
    return resnet(counts, groups, width).to(memory_format=torch.channels_last)


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.norm, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision Transformer (Dosovitskiy et al. 2021)."""

    def __init__(self, dim: int, layers: int, heads: int, hidden: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(torch.zeros(1, (224 // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


MODELS: dict[str, Build] = {
    "Llama 3 3B": llama(3072, 28, 24, 8, 8192, 128256, tied=True),
    "Llama 3 8B": llama(4096, 32, 32, 8, 14336, 128256),
    "Llama 3 13B": llama(5120, 40, 40, 8, 17920, 128256),
    "Llama 3 70B": llama(8192, 80, 64, 8, 28672, 128256),
    "Llama 3 405B": llama(16384, 126, 128, 8, 53248, 128256),
    "Llama 175B": llama(12288, 96, 96, 8, 39680, 128256),
    "Llama 2 7B": llama(4096, 32, 32, 32, 11008, 32000),
    "Llama 2 13B": llama(5120, 40, 40, 40, 13824, 32000),
    "Llama 2 34B": llama(8192, 48, 64, 8, 22016, 32000),
    "Llama 2 70B": llama(8192, 80, 64, 8, 28672, 32000),
    "TinyLlama 1.1B": llama(2048, 22, 32, 4, 5632, 32000),
    "GPT-2 124M": gpt(768, 12, 12, 50304),
    "MPT 70b": gpt(8192, 80, 64),
    "MPT 30b": gpt(7168, 48, 56),
    "MPT 13b": gpt(5120, 40, 40),
    "MPT 7b": gpt(4096, 32, 32),
    "MPT 3b": gpt(2560, 32, 20),
    "MPT 1b": gpt(2048, 24, 16),
    "MPT 760m": gpt(1536, 24, 12),
    "MPT 350m": gpt(1024, 24, 16),
    "GPT 3.6B": gpt(3072, 30, 32, 51200),
    "GPT 5B": gpt(4096, 24, 32, 50304),
    "GPT 18.4B": gpt(6144, 40, 48, 51200),
    "GPT 76.1B": gpt(10240, 60, 80, 51200),
    "GPT 145.6B": gpt(12288, 80, 96, 51200),
    "GPT 175B": gpt(12288, 96, 96, 51200),
    "Mixtral 8x7B": mixture((4096, 32, 32, 8, 14336, 32000), 8, 2),
    "Mixtral 8x22B": mixture((6144, 56, 48, 8, 16384, 32000), 8, 2),
    "Qwen3 30B A3B": partial(
        wide, mixture((2048, 48, 32, 4, 768, 151936), 128, 8), heads=32, kv=4, head=128
    ),
    "Qwen3 235B A22B": partial(
        wide, mixture((4096, 94, 64, 4, 1536, 151936), 128, 8), heads=64, kv=4, head=128
    ),
    "GPT-OSS 20B": partial(
        wide, mixture((2880, 24, 45, 9, 2880, 201088), 32, 4), heads=64, kv=8, head=64
    ),
    "GPT-OSS 120B": partial(
        wide, mixture((2880, 36, 45, 9, 2880, 201088), 128, 4), heads=64, kv=8, head=64
    ),
    "9B of 8 experts": mixture((2048, 24, 16, 4, 7168, 128256), 8, 2),
    "18B of 16 experts": mixture((2048, 24, 16, 4, 7168, 128256), 16, 2),
    "68B of 64 experts": mixture((2048, 24, 16, 4, 7168, 128256), 64, 2),
    "ResNet-50": partial(resnet, (3, 4, 6, 3)),
    "ResNet-50 channels last": partial(channels_last, (3, 4, 6, 3)),
    "ResNet-101": partial(resnet, (3, 4, 23, 3)),
    "ResNet-101 channels last": partial(channels_last, (3, 4, 23, 3)),
    "ResNeXt-101 32x4d": partial(resnet, (3, 4, 23, 3), 32, 128),
    "ResNeXt-101 32x4d channels last": partial(channels_last, (3, 4, 23, 3), 32, 128),
    "ResNeXt-50 32x4d": partial(resnet, (3, 4, 6, 3), 32, 128),
    "ResNeXt-50 32x4d channels last": partial(channels_last, (3, 4, 6, 3), 32, 128),
    "ViT-S/16": partial(ViT, 384, 12, 6, 1536, 16),
    "ViT-B/16": partial(ViT, 768, 12, 12, 3072, 16),
    "ViT-L/16": partial(ViT, 1024, 24, 16, 4096, 16),
    "ViT-g/14": partial(ViT, 1408, 40, 16, 6144, 14),
}
