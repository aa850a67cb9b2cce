"""The warnings before queueing: each formula, and that a sweep shows each warning once."""

import itertools
import time
from pathlib import Path

import pytest
import torch
import yaml

from hpctrain.base.units import GIB
from hpctrain.cluster.slurm import partition_limit
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config, LoRAConfig, TrainConfig
from hpctrain.insight.estimates import cautions
from hpctrain.insight.estimates.memory_fit import Fit, margin_of, on_gpu, on_host, worst
from hpctrain.launch.entry import Entry
from hpctrain.launch.sweeps.before_queueing import notes
from hpctrain.models import Transformer
from hpctrain.runs.run_dir import RunDir
from tests.conftest import ROOT

LLAMA = ["experiment=llama3_8b", "data.path=data", "hardware=h100_sxm"]
LM = ["experiment=stdlib_lm", "data.path=data", "hardware=h100_sxm", "launch.gpus_per_node=1"]
SMALL = [*LM, "precision=bf16", "data.windows.length=129"]
LARGE = ("llama3_70b", "llama3_405b")  # as llama3_8b, and slow to build
LORA = ["train.lora.match='*'", "checkpoint.init_from=base"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*LLAMA, "parallel=ddp"], "8,030,261,248 parameters and the state of AdamW alone take"),
        ([*LLAMA, "parallel=ddp"], "89.7 GiB on each rank (divided by 1)"),
        (
            [*LM, "model.layers=40", "model.dim=2560", "launch.gpus_per_run=0.1"],
            "0.1 of hardware=h100_sxm has 7.9 GiB",
        ),
        (
            [*LLAMA, "parallel=ddp", *LORA, "hardware=rtx_4090"],
            "8,030,261,248 parameters alone take",
        ),
        ([*LLAMA, "launch.cpus_per_task=1"], "use launch.cpus_per_task=2 or more"),
        ([*LLAMA, "parallel.tp=16"], "parallel.tp=16 spans several nodes of 8 ranks"),
        (
            [*LLAMA, "+model.experts=16", "parallel.ep=16", "parallel.dp_shard=16"],
            "parallel.ep=16 spans several nodes",
        ),
        ([*LLAMA, "train.local_sgd.outer_lr=0.7"], "outer_lr=0.7 needs train.local_sgd.every: wit"),
        ([*LLAMA, "train.compression.rank=8"], "compression.rank=8 needs train.compression.kind"),
        ([*LLAMA, "data.windows.field=null"], "data.windows.length=8193 needs data.windows.field"),
    ],
)
def test_a_warning(composer: Composer, words: list[str], text: str) -> None:
    found = list(cautions.cautions(composer.typed(words)))
    assert any(text in each for each in found), found


def test_a_base_in_4_bits_is_not_counted_as_if_it_were_not_packed(composer: Composer) -> None:
    words = [*LLAMA, "parallel=ddp", *LORA, "hardware=rtx_4090", "train.lora.quantize=nf4"]
    assert not [text for text in cautions.cautions(composer.typed(words)) if "alone take" in text]


def test_room_on_a_gpu_and_on_its_host() -> None:
    """A margin stays free in what fits; what decides is what does not fit, then what is unknown."""
    assert on_gpu(95.0 * GIB, 100 * GIB) == Fit(True)
    assert on_gpu(96.0 * GIB, 100 * GIB) == Fit(
        True, True, "needs 96.0 GiB of 100.0 GiB per GPU, so that less than 5% stays free"
    )
    # With adapters more has to stay free: reports of others are up to 20 % above predictions.
    assert margin_of(TrainConfig()) == 0.05
    margin = margin_of(TrainConfig(lora=LoRAConfig(match="*")))
    assert on_gpu(81.0 * GIB, 100 * GIB, margin=margin).tight
    assert not on_gpu(79.0 * GIB, 100 * GIB, margin=margin).tight
    assert on_gpu(101.0 * GIB, 100 * GIB) == Fit(
        False, reason="needs 101.0 GiB of 100.0 GiB per GPU"
    )
    assert on_gpu(1, None).possible is on_gpu(1, 2, complete=False).possible is None
    assert on_gpu(3, 2, complete=False).possible is False
    assert on_host(119 * GIB, 2, 140) == on_host(119 * GIB, 2, None) == Fit(True)
    assert on_host(125 * GIB, 2, 140).tight
    assert on_host(141 * GIB, 2, 140).possible is False
    no, unknown, tight, yes = Fit(False), Fit(None), Fit(True, True), Fit(True)
    assert worst(yes, no) is worst(no, unknown) is no
    assert worst(unknown, tight) is unknown
    assert worst(yes, tight) is tight


def test_nothing_to_warn_of(composer: Composer) -> None:
    words = [*LLAMA, "launch.cpus_per_task=2"]
    assert list(cautions.cautions(composer.typed(words))) == []


def test_a_sweep_of_a_thousand_says_it_once(composer: Composer, tmp_path: Path) -> None:
    configs = []
    for seed in range(1000):
        config = composer.typed(LLAMA) if seed == 0 else Config(**vars(configs[0]))
        config.seed = seed
        configs.append(config)
    other = composer.typed([*LLAMA, "parallel=ddp"])
    began = time.process_time()
    found = cautions.of_sweep([*configs, other])
    assert time.process_time() - began < 5  # one look at each kind of config, not at each config
    *usual, alone = found
    assert alone.startswith("does not fit")
    assert usual == [*cautions.cautions(configs[0])]
    entries = [Entry([], config, RunDir(tmp_path)) for config in (configs[0], other)]
    assert "does not fit" in "".join(notes(entries, cluster=False))


def test_parameters_are_those_of_the_model() -> None:
    files = [file for file in (ROOT / "conf/model").glob("*.yaml") if file.stem not in LARGE]
    models = [yaml.safe_load(file.read_text()) for file in files]
    own = {"hpctrain.models.Transformer": Transformer}
    base = {"_target_": "hpctrain.models.Transformer", "vocab_size": 99, "dim": 48, "layers": 2}
    base |= {"heads": 6, "dense_layers": 1, "shared_experts": 1}
    kinds = itertools.product((None, 2), ("rms", "layer"), ("swiglu", "gelu"), (None, 4), (0, 1))
    for kv_heads, norm, mlp, experts, bias in kinds:
        variant = {"kv_heads": kv_heads, "norm": norm, "mlp": mlp, "experts": experts}
        models.append(base | variant | {"bias": bool(bias), "learned_positions": 17})
    counted = 0
    for model in models:
        if model["_target_"] in own:
            keys = {key: value for key, value in model.items() if key != "_target_"}
            with torch.device("meta"):
                built = own[model["_target_"]](**keys)
            assert cautions.parameter_count(model) == sum(p.numel() for p in built.parameters()), (
                model
            )
            counted += 1
        else:
            assert cautions.parameter_count(model) is None
    assert counted == 32 + 4
    assert cautions.parameter_count({"_target_": "hpctrain.models.Transformer"}) is None


def test_beyond_the_partition(composer: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (
        "PartitionName=batch Default=YES MaxTime=02:00:00\n"
        "PartitionName=long Default=NO MaxTime=UNLIMITED\n"
        "PartitionName=day Default=NO MaxTime=1-00:00:00\n"
        "PartitionName=short Default=NO MaxTime=30:00\n"
    )
    monkeypatch.setattr(partition_limit, "ask", lambda *command, **options: answer)
    partition_limit.partition_lines.cache_clear()
    launch = composer.typed([*LM, "launch.time_min=121"]).launch
    found = partition_limit.beyond_partition(launch, None)
    assert found.startswith("launch.time_min=121: the partition batch allows 120 minutes")
    assert "allows 30 minutes" in partition_limit.beyond_partition(launch, "short")
    assert partition_limit.beyond_partition(launch, "day") == ""
    assert partition_limit.beyond_partition(launch, "long") == ""
    assert partition_limit.beyond_partition(launch, "no") == ""
    partition_limit.partition_lines.cache_clear()
