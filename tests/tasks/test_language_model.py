"""Tests of the language task: its targets, counts and bytes, and the memory that its loss takes."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from hpctrain.config.rules.metrics import names as metric_names
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError, DataError
from hpctrain.models import Transformer
from hpctrain.tasks import Classification, LanguageModel, bind, derived
from hpctrain.tasks.dataset_tokenizer import DatasetTokenizer
from tests.bounds import EXACT
from tests.conftest import run_module
from tests.parallel.parity import spread
from tests.steps import Watched

VOCAB = 300
TEXT = "def f(x):\n    return 'äöü €' + x  # ein Satz\n"


class Fixed(nn.Module):
    """A model that returns the given logits for any input."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.inputs = inputs
        return self.logits


def windows(rows: int = 3, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(VOCAB, (rows, length), generator=random, dtype=torch.int32),
        "mask": torch.ones(rows, dtype=torch.bool),
    }


def test_inputs_and_targets_are_shifted_by_one() -> None:
    batch = {"tokens": torch.tensor([[5, 6, 7]], dtype=torch.uint16), "mask": torch.tensor([True])}
    logits = torch.full((1, 2, 8), -100.0)
    logits[0, 0, 6] = logits[0, 1, 7] = 100.0
    model = Fixed(logits)
    sums = LanguageModel()(model, batch)
    assert [x.tolist() for x in model.inputs] == [[[5, 6]]]
    assert model.inputs[0].dtype == torch.int64
    assert [value.item() for value in sums["loss"]] == [0.0, 2]


class Other(nn.Linear):
    """A model whose second argument is another one, as those of transformers."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> torch.Tensor:
        raise AssertionError("it is refused before it works")


class Swallows(Other):
    def forward(self, *inputs: Any, **more: Any) -> torch.Tensor:
        return super().forward(*inputs, **more)


class Later(Other):
    def forward(self, x: Any, positions: Any = None, documents: Any = None) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Other, r"forward\(input_ids, attention_mask, _\) has attention_mask: a model that takes"),
        (Swallows, r"forward\(inputs, more\) has more"),
        (Later, r"forward\(x, positions, documents\) has positions"),
        (functools.partial(nn.Linear, 1, 1), r"forward\(input\) has none"),
    ],
)
def test_documents_are_no_other_argument_of_a_model(model: Any, said: str) -> None:
    made = functools.partial(spread, model, Config())
    with pytest.raises(ConfigError, match=r"the task gives the model documents after .*" + said):
        made(arguments=LanguageModel(documents=True).arguments)
    assert made(arguments=LanguageModel().arguments).module is not None
    own = functools.partial(Transformer, 61, 8, 1, 2)
    spread(own, Config(), arguments=LanguageModel(documents=True).arguments)


def test_rows_that_are_masked_and_other_documents_do_not_count() -> None:
    batch = windows()
    batch["mask"][2] = False
    batch["tokens_document"] = torch.tensor([[0] * 4 + [1] * 5, [0] * 9, [0] * 9])
    torch.set_default_dtype(torch.float64)
    logits = torch.randn(3, 8, VOCAB)
    model = Fixed(logits)
    sums = LanguageModel(documents=True)(model, batch)
    assert model.inputs[1].tolist() == batch["tokens_document"][:, :-1].tolist()
    losses = F.cross_entropy(logits.mT, batch["tokens"][:, 1:].long(), reduction="none")
    expected = losses[:2].sum() - losses[0, 3]
    assert sums["loss"][0].item() == pytest.approx(expected.item(), rel=EXACT)
    assert sums["loss"][1] == 15


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chunks_change_nothing(dtype: torch.dtype) -> None:
    torch.set_default_dtype(torch.float64)
    batch, found = windows(7, 30), []
    start = torch.randn(7, 29, VOCAB).to(dtype)
    for chunk in (10**6, 17):
        logits = start.clone().requires_grad_()
        loss, count = LanguageModel(chunk=chunk)(Fixed(logits), batch)["loss"]
        loss.backward()
        found.append((loss.detach(), logits.grad, count))
    targets = batch["tokens"][:, 1:].long()
    logits = start.clone().requires_grad_()
    plain = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum")
    plain.backward()
    for loss, gradient, count in found:
        assert count == 7 * 29
        assert loss.item() == pytest.approx(plain.item(), rel=EXACT)
        assert torch.allclose(gradient.double(), logits.grad.double(), rtol=0, atol=EXACT)  # type: ignore[union-attr]


def test_the_float32_logits_are_never_there_as_a_whole() -> None:
    batch, kept, largest = windows(8, 65), 0, 0
    logits = torch.randn(8, 64, VOCAB).bfloat16().requires_grad_()
    own = logits.untyped_storage().data_ptr()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        if tensor.untyped_storage().data_ptr() != own:
            kept += tensor.nbytes
        return tensor

    def see(_: Any, out: Any) -> None:
        nonlocal largest
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        sizes = (each.numel() for each in made if each.dtype == torch.float32)
        largest = max(largest, *sizes, 0)

    with Watched(see), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _ = LanguageModel(chunk=32)(Fixed(logits), batch)["loss"]
        loss.backward()
    # Between forward and backward, only targets and masks are kept beside the logits.
    assert kept <= 8 * 64 * 24
    assert largest == 32 * VOCAB


def test_perplexity_is_that_of_the_mean() -> None:
    means = {"loss": math.log(7.0)}
    assert derived(LanguageModel(), means)["perplexity"] == pytest.approx(7.0)
    assert derived(LanguageModel(), {"loss": 1e4})["perplexity"] == math.inf
    assert math.isnan(derived(LanguageModel(), {"loss": math.nan})["perplexity"])
    assert derived(LanguageModel(), {}) == {}
    assert derived(Classification(), means) == means


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ({"tokens": "text"}, {}, r"task\.tokens=text: the data set's fields are tokens"),
        ({"documents": True}, {}, r"set data\.windows\.documents=true"),
        ({}, {"tokens": torch.zeros(3, dtype=torch.int32)}, r"data\.windows\.field=tokens"),
        ({}, {"tokens": torch.zeros(3, 9)}, r"torch\.float32 of shape \(3, 9\)"),
        ({}, {"tokens": torch.zeros(3, 7, dtype=torch.uint8)}, r"here \(3, 6, 'vocabulary'\)"),
    ],
)
def test_what_does_not_fit(
    task: dict[str, Any], change: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        LanguageModel(**task)(Fixed(torch.zeros(3, 8, VOCAB)), windows() | change)
    with pytest.raises(ValueError, match="chunk=0"):
        LanguageModel(chunk=0)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text(TEXT * (i + 1))
    for name, how in (("bytes", []), ("bpe", ["--train-bpe", "280"])):
        out = str(folder / name)
        run_module("data_prep", "text", str(folder / "text"), out, *how, "--quiet")
    return folder


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_bytes_are_counted_exactly(corpora: Path, name: str) -> None:
    tokenizer = DatasetTokenizer.of(corpora / name, "tokens")
    assert (tokenizer.vocabulary, tokenizer.eod) == ((257, 256) if name == "bytes" else (280, 0))
    ids = tokenizer.encode(TEXT)
    lengths = tokenizer.byte_lengths()
    assert lengths[ids].sum() == len(TEXT.encode())
    assert lengths[tokenizer.eod] == 0
    assert (lengths > 0).sum() == tokenizer.vocabulary - 1
    assert tokenizer.decode([*ids, tokenizer.eod or 0]) == TEXT

    task = bind(LanguageModel(), corpora / name)
    tokens = torch.tensor([[ids[0], *ids, tokenizer.eod]], dtype=torch.int32)
    batch = {"tokens": tokens, "mask": torch.tensor([True])}
    torch.set_default_dtype(torch.float64)
    sums = task(Fixed(torch.randn(1, len(ids) + 1, 300)), batch)
    assert list(sums) == ["loss", "bits_per_byte"]
    assert sums["bits_per_byte"][1] == len(TEXT.encode())
    bits = sums["loss"][0].item() / math.log(2)
    assert sums["bits_per_byte"][0].item() == pytest.approx(bits, rel=EXACT)
    known = metric_names(Config(task={"_target_": "hpctrain.tasks.LanguageModel"})) or ()
    names = derived(task, dict.fromkeys(sums, 1.0))
    assert [name for name in known if name.startswith("val/")] == [f"val/{n}" for n in names]


def test_bytes_of_other_tokenizers(tmp_path: Path) -> None:
    def tokenizer(decoder: Any, vocab: Any) -> DatasetTokenizer:
        added = [
            {"id": 0, "content": "</s>", "special": True},
            {"id": 4, "content": "  ä", "special": False},
        ]
        content = {"model": {"vocab": vocab}, "decoder": decoder, "added_tokens": added}
        return DatasetTokenizer("mine", 6, 0, json.dumps(content))

    fallback = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    expected = [0, 1, 4, 2, 4, 0]
    words = {"</s>": 0, "<0x0A>": 1, "▁def": 2, "ä": 3}
    assert tokenizer(fallback, words).byte_lengths().tolist() == expected
    scored = [[word, -1.0] for word in words]
    assert tokenizer(fallback, scored).byte_lengths().tolist() == expected
    with pytest.raises(DataError, match="its decoder has WordPiece"):
        tokenizer({"type": "WordPiece"}, words).byte_lengths()
    with pytest.raises(DataError, match="is damaged"):
        DatasetTokenizer("mine", 6, 0, "{").byte_lengths()


def test_a_field_of_bytes_needs_no_tokenizer(digits: Path, tmp_path: Path) -> None:
    run_module("data_prep", "sample", "stdlib", str(tmp_path / "stdlib"), "--quiet")
    tokenizer = DatasetTokenizer.of(tmp_path / "stdlib", "text")
    assert (tokenizer.vocabulary, tokenizer.eod) == (256, None)
    assert np.array_equal(tokenizer.byte_lengths(), np.ones(256))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([0xE4]) == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(DataError, match="'label' is no field of tokens"):
        DatasetTokenizer.of(digits, "label")
