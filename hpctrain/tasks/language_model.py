"""Language modelling: predict the next token."""

import copy
import logging
import math
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.shards.types import Batch
from hpctrain.engine.tasks.task import CutsSequence, SplitTask, Sums
from hpctrain.tasks.batches import field, in_default_dtype, number_of
from hpctrain.tasks.dataset_tokenizer import DatasetTokenizer
from hpctrain.tasks.labels import Labels

log = logging.getLogger(__name__)
DOCUMENT = "_document"  # FIELD_document is made by hpctrain.data.sources.windows


class LanguageModel(SplitTask):
    """Cross-entropy of the next token, and bits per byte.

        window   t0 t1 t2 t3 t4        samples of length context + 1
        inputs   t0 t1 t2 t3
        targets     t1 t2 t3 t4

    The sums are `loss`, in nats over the predicted tokens, and `bits_per_byte`, in bits over the
    bytes of text that these tokens stand for. The latter compares models with different tokenizers,
    and with compressors of files: a model of b bits per byte compresses text to b / 8 of its size
    by arithmetic coding. Tokens that stand for no text, such as the end of a document, cost bits
    and have no bytes. `bits_per_byte` needs the data set's tokenizer, which `bind` reads. `derived`
    adds `perplexity`, exp(loss).

    Args:
        tokens: Field of the windows, an integer dtype, shape (batch, length + 1).
        documents: Whether the model gets the documents of FIELD_document (data.windows.documents)
            as its second argument, which must be called `documents`, so that it attends only within
            a document. A target that begins another document than its input then does not count.
        chunk: Number of positions whose logits are converted to float32 at a time. The conversion
            is repeated in the backward pass, so the float32 logits of the whole batch are never in
            memory.
    """

    loss_parallel = True
    counts = "tokens"

    def __init__(self, tokens: str = "tokens", documents: bool = False, chunk: int = 1024) -> None:
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: it is 1 or more")
        self.tokens, self.documents, self.chunk = tokens, documents, chunk
        self._labels = Labels("task.tokens", tokens)
        self.arguments = ("documents",) if documents else ()
        self._bytes: torch.Tensor | None = None
        self._part: CutsSequence | None = None

    def bind(self, source: str | Path) -> Self:
        """Return this task with the number of bytes of each token, for `bits_per_byte`.

        Without a known tokenizer there is a warning, and no `bits_per_byte`.
        """
        bound = copy.copy(self)
        try:
            lengths = DatasetTokenizer.of(source, self.tokens).byte_lengths()
        except DataError as error:
            log.warning("no bits_per_byte: %s", error)
        else:
            bound._bytes = torch.from_numpy(lengths)
        return bound

    def on(self, part: CutsSequence) -> Self:
        """Return this task for a model that returns the logits of `part` of the positions."""
        divided = copy.copy(self)
        divided._part = part
        return divided

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return tokens, int64 (batch, length), and the documents if the model gets them."""
        tokens = self._windows(batch)
        inputs = (tokens[:, :-1].long(),)
        return (*inputs, self._documents(batch)[:, :-1]) if self.documents else inputs

    def sums(self, outputs: Any, batch: Batch) -> Sums:
        """Return the sums of a `Task`; rows whose mask is False do not count.

        The outputs are logits, a floating dtype (batch, length, vocabulary), or an object that has
        them as its attribute `logits`, as those of Hugging Face's transformers.
        """
        logits: torch.Tensor = getattr(outputs, "logits", outputs)
        targets = self._windows(batch)[:, 1:].long()
        counted = batch["mask"][:, None].expand_as(targets)
        if self.documents:
            documents = self._documents(batch)
            counted = counted & (documents[:, 1:] == documents[:, :-1])
        if self._part is not None:
            targets, counted = self._part.cut(targets, 1), self._part.cut(counted, 1)
        if logits.shape[:-1] != targets.shape:
            raise ConfigError(
                f"the model returned logits of shape {tuple(logits.shape)}; a language model "
                f"returns (batch, length, vocabulary), here {(*targets.shape, 'vocabulary')}"
            )
        size = logits.shape[-1]
        there = f"the model returned logits of {size} tokens"
        targets, right = self._labels.inside(targets, size, there)
        losses = self._losses(logits.flatten(0, 1), targets.flatten())
        weight = counted if right is None else counted / right
        total = (losses * weight.flatten()).sum()
        sums = {"loss": (total, number_of(counted))}
        if self._bytes is not None:
            if self._bytes.device != targets.device:
                self._bytes = self._bytes.to(targets.device)
            nbytes = (self._bytes[targets] * counted).sum()
            sums["bits_per_byte"] = (total.detach() / math.log(2), nbytes)
        return sums

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Return the perplexity, exp(loss): infinite where it is too large for a float."""
        try:
            return {"perplexity": math.exp(means["loss"])}
        except OverflowError:
            return {"perplexity": math.inf}

    def _windows(self, batch: Batch) -> torch.Tensor:
        tokens = field(batch, self.tokens, "task.tokens")
        if tokens.dim() != 2 or tokens.shape[1] < 2 or tokens.is_floating_point():
            raise ConfigError(
                f"task.tokens={self.tokens}: the batch has {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}; a language model needs integers (batch, 2 or more), such "
                f"as the windows of data.windows.field={self.tokens}"
            )
        return tokens

    def _documents(self, batch: Batch) -> torch.Tensor:
        if self.tokens + DOCUMENT not in batch:
            raise ConfigError(
                "task.documents=true: the batch has no documents; set data.windows.documents=true"
            )
        return batch[self.tokens + DOCUMENT]

    def _losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each row: float32 (n,), of logits (n, vocabulary)."""
        if len(targets) <= self.chunk:
            return _cross_entropy(logits, targets)
        # `split` has one gradient for all chunks; slices would each make one of the full size.
        losses = [
            checkpoint(_cross_entropy, *rows, use_reentrant=False, preserve_rng_state=False)
            for rows in zip(logits.split(self.chunk), targets.split(self.chunk), strict=True)
        ]
        return torch.cat(losses)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(in_default_dtype(logits), targets, reduction="none")
    return losses.to_local() if isinstance(losses, DTensor) else losses  # all ranks have them
