"""What is said before the runs of a sweep are queued."""

import dataclasses
import time
from pathlib import Path

import pytest

from hpctrain.cluster.slurm import partition_limit
from hpctrain.cluster.slurm.partition_limit import Road
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.launch.entry import Entry
from hpctrain.launch.sweeps import before_queueing
from hpctrain.launch.sweeps.before_queueing import notes
from hpctrain.runs.run_dir import RunDir

DIGITS = ["experiment=digits", "data.path=data"]
IDLE = {
    "train.local_sgd.outer_lr=0.7": "outer_lr=0.7 needs train.local_sgd.every: wit",
    "train.compression.rank=8": "compression.rank=8 needs train.compression.kind",
    "data.windows.length=129": "data.windows.length=129 needs data.windows.field",
}


def test_a_key_that_does_nothing_is_said_once_for_a_sweep(
    composer: Composer, tmp_path: Path
) -> None:
    usual = composer.typed(DIGITS)
    configs = [Config(**vars(usual) | {"seed": seed}) for seed in range(1000)]
    configs += [composer.typed([*DIGITS, word]) for word in IDLE]
    entries = [Entry([], config, RunDir(tmp_path)) for config in configs]
    began = time.process_time()
    found = [*notes(entries, cluster=False)]
    assert time.process_time() - began < 5  # one look at each kind of config, not at each config
    assert len(found) == len(IDLE)
    assert all(text in said for text, said in zip(IDLE.values(), found, strict=True))


def test_beyond_the_partition(composer: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (
        "PartitionName=batch Default=YES MaxTime=02:00:00\n"
        "PartitionName=long Default=NO MaxTime=UNLIMITED\n"
        "PartitionName=day Default=NO MaxTime=1-00:00:00\n"
        "PartitionName=short Default=NO MaxTime=30:00\n"
    )
    monkeypatch.setattr(partition_limit, "ask", lambda *command, **options: answer)
    partition_limit.partition_lines.cache_clear()
    launch = composer.typed(["experiment=digits", "data.path=data", "launch.time_min=121"]).launch
    found = partition_limit.beyond_partition(launch, None)
    assert found.startswith("launch.time_min=121: the partition batch allows 120 minutes")
    assert "allows 30 minutes" in partition_limit.beyond_partition(launch, "short")
    assert partition_limit.beyond_partition(launch, "day") == ""
    assert partition_limit.beyond_partition(launch, "long") == ""
    assert partition_limit.beyond_partition(launch, "no") == ""
    partition_limit.partition_lines.cache_clear()


def test_how_many_calls_of_sbatch_the_chains_of_a_sweep_take(
    composer: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = composer.typed(DIGITS)
    ways = {None: Road("requeue"), 3: Road("chain", "it cancels", 3)}
    monkeypatch.setattr(before_queueing, "road", lambda site, chain: ways[chain])
    monkeypatch.setattr(before_queueing, "beyond_partition", lambda *_: "")

    def said(chain: int | None, count: int) -> str:
        launch = dataclasses.replace(usual.launch, chain=chain)
        config = Config(**vars(usual) | {"launch": launch})
        return "".join(notes([Entry([], config, RunDir(tmp_path))] * count, cluster=True))

    assert said(3, 1000).startswith("it cancels3,000 calls of sbatch, one for each run and link")
    assert said(3, 3) == "it cancels"
    assert said(None, 1000) == ""
    RunDir(tmp_path).update(state="finished")
    assert said(3, 1000) == "it cancels"
