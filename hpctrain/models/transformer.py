"""A decoder-only Transformer, which predicts the next token at each position.

    tokens ── embed (+ positions) ── layers ── norm ── head ── logits
                                       │
        x + attention(attention_norm(x)), then x + mlp(mlp_norm(x))

Keyword arguments choose between the shapes of two families, whose weights of Hugging Face's
transformers fit (the tests copy them):

| | Llama 3 (Grattafiori et al. 2024) | GPT-2 (Radford et al. 2019) |
|---|---|---|
| `norm` | "rms": RMSNorm (Zhang and Sennrich 2019) | "layer": LayerNorm (Ba et al. 2016) |
| `mlp` | "swiglu" (Shazeer 2020) | "gelu", tanh form (Hendrycks and Gimpel 2016) |
| `learned_positions` | None: rotary (Su et al. 2021) | 1024 |
| `kv_heads` | fewer than `heads` (Ainslie et al. 2023) | None: as many as `heads` |
| `bias`, `tied` | False | True |
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.engine.layers.plan import Plan
from hpctrain.models.attention import Attention, Context, Documents, Masks, Rotation, rotary
from hpctrain.models.experts import Experts
from hpctrain.models.layers import GELU, STD, Embedding, Linear, SwiGLU, make_norm
from hpctrain.models.model import Model
from hpctrain.models.transformer_plan import plan_of


class Transformer(Model):
    """A decoder-only Transformer; the module has the variants.

    Weights are drawn from a normal distribution of standard deviation 0.02. For the projections
    that add to the residual stream it is 0.02 / sqrt(2 * layers), as in GPT-2.

    Args:
        vocab_size: Number of tokens; ids are 0 to vocab_size - 1.
        dim: Width of the residual stream.
        layers: Number of layers.
        heads: Number of query heads. It must divide `dim`.
        kv_heads: Number of key and value heads, each of which serves heads / kv_heads query heads
            (grouped-query attention). None means `heads`.
        hidden: Width of the MLP. None means 4 * dim for "gelu", and for "swiglu" 8/3 * dim, rounded
            up to a multiple of 32, which has about as many parameters.
        norm: "rms" or "layer".
        mlp: "swiglu" or "gelu".
        learned_positions: Number of learned positions, which is the longest context. None uses
            rotary position embeddings, which have no longest context.
        theta: Base of the wavelengths of the rotary embedding.
        eps: Added to the variance in the norms.
        bias: Whether linear layers (but not the head) and LayerNorms have a bias.
        tied: Whether the head uses the weight of the embedding (Press and Wolf 2017).
        dropout: Probability of zeroing an element of the embedded tokens, and of what attention and
            MLP add to the residual stream, in training (Vaswani et al. 2017); 0 <= dropout < 1.
        experts: Number of experts in each layer, which replace the MLP and are "swiglu" without
            biases; `Experts` explains them. None means no experts.
        experts_per_token: Number of experts that each token uses.
        expert_hidden: Width of an expert. None means `hidden`.
        shared_experts: Number of experts that every token uses in addition.
        dense_layers: The first layers, this many of them, keep the MLP, as in DeepSeek-V3.
        expert_scores: "sigmoid" or "softmax".
        balance_rate: Speed at which the loads of the experts are balanced. 0 does not balance.

    Attributes:
        vocab_size: As given.
        layers: The layers, an `nn.ModuleList` of `Layer`.
        sequence_parts: The number of parts of the sequence of which the first input is one. It is
            1 except in the later stages of a pipeline, whose input is a part of the residual
            stream where other degrees divide the sequence.
        context: The part of each row that this rank has; None (the default) means all of it. The
            tokens and documents of a forward pass are whole rows in any case.

    Raises:
        ValueError: Heads, widths or names do not fit together.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int | None = None,
        hidden: int | None = None,
        *,
        norm: str = "rms",
        mlp: str = "swiglu",
        learned_positions: int | None = None,
        theta: float = 10_000.0,
        eps: float = 1e-5,
        bias: bool = False,
        tied: bool = False,
        dropout: float = 0.0,
        experts: int | None = None,
        experts_per_token: int = 2,
        expert_hidden: int | None = None,
        shared_experts: int = 0,
        dense_layers: int = 0,
        expert_scores: str = "sigmoid",
        balance_rate: float = 1e-3,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        _check(dim, layers, heads, kv_heads, norm, mlp, rotary=learned_positions is None)
        if hidden is None:
            hidden = 4 * dim if mlp == "gelu" else -(-8 * dim // (3 * 32)) * 32
        super().__init__()
        self.vocab_size, self.theta, self.sequence_parts = vocab_size, theta, 1
        self.context: Context | None = None
        self.head_dim, self._experts = dim // heads, experts
        self._numbers = {"heads": heads, "kv_heads": kv_heads, "hidden": hidden}
        self.embed = Embedding(vocab_size, dim)
        self.positions = None if learned_positions is None else Embedding(learned_positions, dim)
        self.dropout = nn.Dropout(dropout)
        std = STD / math.sqrt(2 * layers)
        width = expert_hidden or hidden

        def make_mlp(layer: int) -> nn.Module:
            if experts is None or layer < dense_layers:
                return (SwiGLU if mlp == "swiglu" else GELU)(dim, hidden, bias, std)
            shared = SwiGLU(dim, shared_experts * width, bias, std) if shared_experts else None
            return Experts(
                *(dim, width, experts, experts_per_token),
                out_std=std,
                std=STD,
                scores=expert_scores,
                balance_rate=balance_rate,
                shared=shared,
            )

        self.layers = nn.ModuleList(
            Layer(
                attention_norm=make_norm(norm, dim, eps, bias),
                attention=Attention(dim, heads, kv_heads, bias, std),
                mlp_norm=make_norm(norm, dim, eps, bias),
                mlp=make_mlp(layer),
                dropout=dropout,
            )
            for layer in range(layers)
        )
        self.norm = make_norm(norm, dim, eps, bias)
        self.head = Linear(dim, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        looked_up = [] if tied else [self.embed]
        looked_up += [] if self.positions is None else [self.positions]
        parameters = sum(p.numel() for p in self.parameters())
        self._multiplied = parameters - sum(table.weight.numel() for table in looked_up)
        for module in self.modules():
            if isinstance(module, Experts):
                held = sum(p.numel() for p in module.bank.parameters())
                self._multiplied -= held // module.experts * (module.experts - module.per_token)

    def forward(self, tokens: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of the token that follows each position.

        Args:
            tokens: int64 (batch, length).
            documents: An integer dtype, (batch, length): the number of each token's document, which
                never decreases in a row. A token attends only to its own document, and positions
                begin at 0 in each. The flash kernel needs no mask for that (`Documents.fit`); any
                other takes one of batch * length^2 bytes. None: each row is one document.

        Returns:
            Logits (batch, length, vocab_size), in the dtype of the computation; those of this
            rank's positions if there is a `context`.
        """
        length = tokens.shape[1] * self.sequence_parts
        positions = _positions(length, documents, tokens.device)
        masks: Masks | Documents | None = None
        if self.context is not None:
            masks = None if documents is None else self.context.masks(documents)
            positions = self.context.cut(positions, 1)
            if self.sequence_parts == 1:
                tokens = self.context.cut(tokens, 1)
        x = self._embedded(tokens)
        if self.context is None and documents is not None:
            flash = Documents.fit(x, self.head_dim)
            masks = Documents.of(positions) if flash else (_mask(documents),)
        rotation = None
        if self.positions is None:
            rotation = rotary(positions, self.head_dim, self.theta, x.dtype)
        elif not tokens.is_floating_point():  # later stages of a pipeline get the residual stream
            if length > self.positions.num_embeddings:
                raise ConfigError(
                    f"model.learned_positions={self.positions.num_embeddings}: the samples have "
                    f"{length} tokens; shorten data.windows.length"
                )
            x = x + self.positions(positions)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, rotation, masks, self.context)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    @property
    def plan(self) -> Plan:
        """How the model may be divided."""
        return plan_of(self, self.layers, self._numbers, experts=self._experts is not None)

    def flops_per_token(self, length: int) -> int:
        """Return the floating-point operations of one of `length` tokens in a training step.

        This is 6 N + 12 layers * dim * length, the model FLOPs of PaLM (Chowdhery et al. 2022,
        appendix B): N counts the parameters that are multiplied with activations, which leaves out
        tables of embeddings that are only looked up, and the experts that a token does not use. The
        backward pass costs twice the forward pass. Attention counts as if it were not causal, and
        activations that are computed twice count once, as is usual for MFU.
        """
        dim = self.embed.embedding_dim
        return 6 * self._multiplied + 12 * len(self.layers) * dim * length

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        try:
            x: torch.Tensor = self.embed(tokens)
        except IndexError:
            raise ConfigError(
                f"model.vocab_size={self.vocab_size}: the data has tokens from "
                f"{int(tokens.min())} to {int(tokens.max())}; ids are 0 to vocab_size - 1"
            ) from None
        return x


class Layer(nn.Module):
    """Attention and an MLP, each of which adds to the residual stream.

    In training, dropout is applied to what both add.
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: Attention,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_dropout, self.mlp_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        masks: Masks | Documents | None,
        context: Context | None = None,
    ) -> torch.Tensor:
        """Map (batch, length, dim) to the same shape; `Attention` has the other arguments."""
        added = self.attention(self.attention_norm(x), rotation, masks, context)
        x = x + self.attention_dropout(added)
        out: torch.Tensor = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        return out


def _positions(length: int, documents: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return the positions within the documents, (batch or 1, length)."""
    places = torch.arange(length, device=device)[None]
    if documents is None:
        return places
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return places - (places * begins).cummax(1).values


def _mask(documents: torch.Tensor) -> torch.Tensor:
    """Return the mask of `Attention`, bool (batch, 1, length, length)."""
    return (documents[:, :, None] == documents[:, None, :]).tril_()[:, None]


def _check(
    dim: int, layers: int, heads: int, kv_heads: int, norm: str, mlp: str, *, rotary: bool
) -> None:
    if min(dim, layers, heads, kv_heads) < 1:
        raise ValueError(
            f"dim={dim}, layers={layers}, heads={heads} and kv_heads={kv_heads} are 1 or more"
        )
    if dim % heads:
        raise ValueError(f"heads={heads} does not divide dim={dim}")
    if heads % kv_heads:
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"kv_heads={kv_heads} does not divide heads={heads}; {', '.join(fitting)} do"
        )
    if rotary and dim // heads % 2:
        raise ValueError(
            f"dim={dim} / heads={heads} = {dim // heads} elements in a head: the rotary embedding "
            "needs an even number"
        )
    if norm not in ("rms", "layer"):
        raise ValueError(f"norm={norm}: it is rms or layer")
    if mlp not in ("swiglu", "gelu"):
        raise ValueError(f"mlp={mlp}: it is swiglu or gelu")
