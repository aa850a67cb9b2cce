"""experiment=finetune: a tiny model of Hugging Face is trained, saved and adapted by LoRA."""

from pathlib import Path

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.validate import validate
from tests.conftest import journal_metrics, run_module, runs

FIRST = "def add_{0}(left, right):\n    return left + right + {0}\n\n"
OWN = "SELECT name, sum(value) FROM table_{0} WHERE value > {0} GROUP BY name;\n"
TINY = {
    "_target_": "transformers.LlamaConfig",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_experiment_is_valid(composer: Composer) -> None:
    validate(composer.typed(["experiment=finetune"]), 1)


def texts(folder: Path, line: str) -> None:
    folder.mkdir()
    for number in range(60):
        lines = (line.format(number * 31 % 17 + i) for i in range(20))
        (folder / f"{number}.txt").write_text("".join(lines))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_from_a_folder_learns_own_text(tmp_path: Path) -> None:
    import hpctrain

    texts(tmp_path / "first", FIRST)
    texts(tmp_path / "own", OWN)
    split = ["--split", "train=0.9,val=0.1", "--quiet"]
    run_module("data_prep", "text", "first", "data/a", "--train-bpe", "300", *split, cwd=tmp_path)
    tokenizer = str(tmp_path / "data" / "a" / "tokenizer.json")
    given = ["own", "data/mine_text", "--tokenizer", tokenizer, *split]
    run_module("data_prep", "text", *given, cwd=tmp_path)

    small = ["train.max_steps=80", "train.log_every=1", "data.windows.length=65"]
    small += ["data.windows.stride=64", "tracking.upload=false"]
    config = ", ".join(f"{name}: {value}" for name, value in TINY.items())
    first = [f"+model.config={{{config}}}", "data.path=data/a", "output_dir=first_runs"]
    target = "+model._target_=transformers.AutoModelForCausalLM.from_config"
    run_module(
        "hpctrain",
        *("task=language_model", target, *first, "data.windows.field=tokens"),
        *("data.fields=[tokens]", "optimizer.lr=3e-3", "train.global_batch_size=8", *small),
        cwd=tmp_path,
    )
    (trained,) = runs(tmp_path / "first_runs")
    model = hpctrain.load_run(trained).model()
    model.save_pretrained(tmp_path / "base")

    lora = ["experiment=finetune", "checkpoint.init_from=base", "optimizer.lr=5e-3", *small]
    run_module("hpctrain", *lora, cwd=tmp_path)
    (tuned,) = runs(tmp_path / "runs")
    losses = journal_metrics(tuned)
    before, after = losses["train/loss", 1], losses["val/loss", 80]
    print(f"loss {before:.3f} -> {after:.3f}, bits per byte {losses['val/bits_per_byte', 80]:.3f}")
    assert after < 0.7 * before
