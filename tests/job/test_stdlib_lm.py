"""experiment=stdlib_lm learns a small corpus, reports exact metrics and generates text."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hpctrain.base.processes import gpu_driver
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import ConfigError, DataError, StorageError
from hpctrain.results.text_generation import Generator
from hpctrain.runs.freeze import check, freeze
from tests.bounds import EXACT
from tests.conftest import Completed, run_json, run_module

LINES = "def add_{0}(x):\n    # adds {0}, größer\n    return x + {0}\n\n"
SMALL = (
    *("model.dim=64", "model.layers=2", "model.vocab_size=300", "data.windows.length=65"),
    *("data.windows.stride=64", "train.max_steps=60", "train.eval_every=60", "train.log_every=20"),
    *("scheduler.warmup_steps=5", "checkpoint.every_steps=30", "tracking.enabled=false"),
    "precision=fp64",  # rounding is then far below any mistake
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "in").mkdir()
    for i in range(40):
        text = "".join(LINES.format(j * i % 29) for j in range(30))
        (folder / "in" / f"{i}.txt").write_text(text)
    run_module(
        *("data_prep", "text", str(folder / "in"), str(folder / "data"), "--quiet"),
        *("--train-bpe", "300", "--split", "train=0.8,val=0.2"),
    )
    return folder / "data"


def code_length(generator: Generator, parts: Iterator[Any]) -> dict[str, float]:
    """Return the metrics of parts of the held-out text, each of which is evaluated alone."""
    nats = count = nbytes = 0.0
    lengths = generator.tokenizer.byte_lengths()
    for part in parts:
        tokens = torch.from_numpy(part.astype(np.int64))
        with torch.no_grad():
            logits = generator.model(tokens[None, :-1])[0]
        nats += F.cross_entropy(logits, tokens[1:], reduction="sum").item()
        count += len(part) - 1
        nbytes += lengths[tokens[1:].numpy()].sum()
    return {"val/loss": nats / count, "val/bits_per_byte": nats / math.log(2) / nbytes}


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    folder = tmp_path_factory.mktemp("trained")
    done = run_module(
        *("hpctrain", "experiment=stdlib_lm", f"data.path={corpus}", "output_dir=runs", *SMALL),
        cwd=folder,
    )
    (run,) = (folder / "runs").glob("stdlib_lm-*")
    return run, done


@pytest.fixture(scope="module")
def generator(trained: tuple[Path, Completed]) -> Generator:
    return Generator.of(trained[0])


def test_bits_per_byte_are_exact(
    trained: tuple[Path, Completed], generator: Generator, corpus: Path
) -> None:
    """The metric is the code length of the held-out text, divided by its number of bytes."""
    result = run_json(trained[0])["result"]
    reader = Reader(corpus, "val")
    tokens = reader.read(np.arange(len(reader)), None)["tokens"].values  # type: ignore[union-attr]
    windows = (tokens[start : start + 65] for start in range(0, len(tokens) - 64, 64))
    expected = code_length(generator, windows)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=EXACT)


def test_generated_text(
    trained: tuple[Path, Completed],
    generator: Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, _ = trained
    arguments = ("predict", str(run), "--prompt", "def", "--tokens", "60", "--temperature", "0.5")
    done = run_module("hpctrain", *arguments)
    assert done.stdout.startswith("def add_")
    assert "return x +" in done.stdout
    assert f"{run}/checkpoints/step-00000060" in done.stderr
    options: dict[str, Any] = {"temperature": 0.5}
    assert "".join(generator("def", 60, seed=0, **options)) + "\n" == done.stdout
    assert "".join(generator("def", 60, seed=1, **options)) + "\n" != done.stdout
    monkeypatch.setattr(gpu_driver, "nvidia", lambda: "580.65.06")  # there is no GPU here
    Generator.of(run)
    assert "the CPU generates: torch" in caplog.text
    likeliest = ["".join(generator("def", 40, temperature=0, seed=s)) for s in (0, 1)]
    assert likeliest[0] == likeliest[1]


def test_pieces_are_whole_characters(generator: Generator) -> None:
    pieces = list(generator("    # adds 3,", 12, temperature=0, seed=0))
    assert pieces[0] == "    # adds 3,"
    assert "".join(pieces).startswith("    # adds 3, größer")
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_text_ends_with_the_document(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(300)
    logits[generator.tokenizer.eod] = 1e9  # type: ignore[index]
    monkeypatch.setattr(generator.model, "forward", lambda ids: logits.expand(*ids.shape, -1))
    assert "".join(generator("return x", 50, temperature=1.0, seed=0)) == "return x"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "the prompt is empty"),
        (["a", "--tokens", "0"], "--tokens 0: it is 1 or more"),
        (["a", "--temperature", "-1"], "--temperature -1.0: it is 0 or more"),
        (["a", "--temperature", "nan"], "--temperature nan"),
    ],
)
def test_options_that_do_not_fit(
    trained: tuple[Path, Completed], arguments: list[str], said: str
) -> None:
    from hpctrain.results.commands.generate import main

    with pytest.raises(ConfigError, match=said):
        main([str(trained[0]), *arguments])


def test_runs_that_cannot_generate(
    trained: tuple[Path, Completed], composer: Composer, digits: Path, tmp_path: Path
) -> None:
    from hpctrain.results.commands.generate import main

    other = composer.typed(
        ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    )
    freeze(other, run := check(other))
    with pytest.raises(ConfigError, match=r"is no language model: .*Classification"):
        Generator.of(run.path)
    with pytest.raises(DataError, match="nothing_here"):
        Generator.of(trained[0], str(tmp_path / "nothing_here"))
    bare = tmp_path / "runs" / "bare-00000000"
    bare.mkdir(parents=True)
    for name in ("config.yaml", "run.json"):
        (bare / name).write_bytes((trained[0] / name).read_bytes())
    with pytest.raises(StorageError, match="has no checkpoint"):
        main([str(bare), "def"])
    (bare / "checkpoints" / "step-00000030").mkdir(parents=True)
    with pytest.raises(StorageError, match="no checkpoint is intact"):
        main([str(bare), "def"])
