"""`launch.gpu_type`: the layout follows from the kind of GPU, and what was set is kept.

There is no GPU here: the name that a driver would tell stands in for it.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.frozen import dump
from hpctrain.config.frozen import load as load_config
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.estimates.measured_run import measured_run
from hpctrain.hardware import load, smallest
from hpctrain.launch.entry import Entry
from hpctrain.launch.sweeps.before_queueing import gpu_kinds
from hpctrain.plan import by_kind
from hpctrain.run_record import ChosenLayout
from hpctrain.runs.freeze import check, freeze
from hpctrain.runs.run_dir import RunDir
from hpctrain.slurm.sbatch_options import sbatch_options
from hpctrain.units import GIB
from tests.bounds import EXACT
from tests.conftest import run_json, run_module, runs, torchrun

KINDS = "launch.gpu_type=[a100,h100_sxm:hbm80]"
TWO = ("launch.tasks_per_node=2", "launch.gpus_per_node=2", KINDS)

WORDS = ("parallel.device=cpu", "train.max_steps=30", "train.log_every=5", "tracking.upload=false")
Made = Callable[..., Config]


@pytest.fixture
def made(composer: Composer, digits: Path, tmp_path: Path) -> Made:
    def make(*words: str) -> Config:
        where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
        return composer.typed(["experiment=digits", *where, *TWO, *words])

    return make


def test_what_was_set_is_kept(made: Made) -> None:
    def chosen(*words: str, memory: float = 80.0) -> ChosenLayout | str:
        kind = replace(load("a100_80"), memory_bytes=int(memory * GIB))
        (found,) = by_kind.choices(made(*words), [kind], words)
        return found

    free = chosen()
    assert isinstance(free, ChosenLayout)
    assert {text.partition("=")[0] for text in free.overrides} >= {"parallel.zero"}
    assert "zero1 on 2 ranks" in free.text
    own = chosen("parallel.zero=3", "parallel.dp_shard=-1", "parallel.dp_replicate=1")
    assert isinstance(own, ChosenLayout)
    assert (own.overrides, "zero3 on 2 ranks" in own.text) == ((), True)
    parts = chosen("train.accumulate=4")
    assert isinstance(parts, ChosenLayout)
    assert "train.accumulate" not in str(parts.overrides)
    assert "micro-batches of 8 samples" in parts.text
    sized = chosen("train.micro_batch_size=4")
    assert isinstance(sized, ChosenLayout)
    assert "micro-batches of 4 samples" in sized.text
    assert "train." not in str(sized.overrides)
    assert "ddp on 2 ranks: " in str(chosen(memory=0.5))


def test_the_job_may_start_on_any_of_the_kinds(made: Made) -> None:
    for given, expected in {
        "ib": "ib&[a100|hbm80]",
        "ib|eth": "(ib|eth)&[a100|hbm80]",
        "(ib|eth)&big": "(ib|eth)&big&[a100|hbm80]",
        "(ib&big)|eth": "",
    }.items():
        config = made(f"site.constraint='{given}'")
        options = partial(sbatch_options, "n", config.launch, config.site, [1], 60)
        if expected:
            assert options()["constraint"] == expected
            continue
        with pytest.raises(ConfigError, match=r"site\.constraint=\(ib&big\)\|eth: beside"):
            options()
    assert smallest("a100").name == "a100_40"
    for wrong, text in {
        "[v100]": "'v100' is no file of conf/hardware",
        "[a100:x|y]": "is not the name of a feature",
    }.items():
        with pytest.raises(ConfigError, match=r"launch\.gpu_type") as caught:
            check(made(f"launch.gpu_type={json.dumps([wrong[1:-1]])}"))
        assert text in str(caught.value)


@pytest.mark.slow
def test_a_kind_on_which_nothing_fits_is_refused(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    fits, wrong = made(), made("train.global_batch_size=3")  # two ranks cannot divide it
    entries = [Entry([], each, RunDir.of(each, "digest")) for each in (fits, wrong)]
    with pytest.raises(ConfigError, match=r"nothing fits on a100 \(.*ddp on 2 ranks"):
        gpu_kinds(entries)
    said = " ".join(capsys.readouterr().err.split())
    assert f"1 run like {entries[0].run.name} on a100: NVIDIA A100 SXM 40 GB: zero1 on 2" in said


def test_the_choice_of_a_job_is_in_its_run_directory(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made(*WORDS)
    run = check(config)
    freeze(config, run, list(WORDS))
    name, frozen = run.name, run.config_file.read_bytes()
    monkeypatch.setattr(by_kind, "_title", lambda: "NVIDIA H100 80GB HBM3")
    assert by_kind.main(["--run", str(run.path)]) == 0
    layout = ChosenLayout.of(run.path)
    assert layout.text.startswith("NVIDIA H100 SXM 80 GB: zero1 on 2 ranks, micro-batches of 32")
    assert load_config(run.config_file, layout.overrides).parallel.zero == 1
    assert (RunDir.of(config, run.data_digest).name, run.config_file.read_bytes()) == (name, frozen)
    # Who asks for the run again may do so without launch.gpu_type, or with another layout.
    freeze(config, run, list(WORDS))
    assert ChosenLayout.of(run.path).text == ""
    # A job on a GPU that is not known has the layout as it was given.
    monkeypatch.setattr(by_kind, "_title", lambda: "NVIDIA X1")
    by_kind.main(["--run", str(run.path)])
    assert ChosenLayout.of(run.path).overrides == ()


def test_what_a_model_prints_or_raises_disturbs_no_budget(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def estimator(config: Config) -> None:
        print("the code of a user")
        raise TypeError("of a model of a user")

    (tmp_path / "0.yaml").write_text(dump(made()))
    monkeypatch.setattr(by_kind, "_estimator", estimator)
    assert by_kind.main(["--hours", str(tmp_path / "0.yaml")]) == 0
    assert json.loads(capsys.readouterr().out) == [None]


@pytest.mark.slow
def test_the_ranks_take_the_choice_and_have_the_losses_of_one_process(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*WORDS, "precision=fp64")
    config = made(*words)
    run = check(config)
    freeze(config, run, list(words))
    monkeypatch.setattr(by_kind, "_title", lambda: "NVIDIA H100 80GB HBM3")
    by_kind.main(["--run", str(run.path)])
    text = ChosenLayout.of(run.path).text
    assert f"launch.gpu_type: {text}" in torchrun(2, "run", str(run.path)).stderr
    assert measured_run(run.path).config.parallel.zero == 3
    where = (f"data.path={config.data.path}", f"output_dir={tmp_path}/alone")
    run_module("hpctrain", "experiment=digits", *where, *words)
    (alone,) = runs(tmp_path / "alone")
    assert alone.name == run.name
    one, two = (run_json(each)["result"]["val/loss"] for each in (alone, run.path))
    assert one == pytest.approx(two, rel=EXACT)
