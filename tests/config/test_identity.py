# ruff: noqa: RUF009 (`key` and `section` return dataclass fields)
"""The name of a run depends on the values that differ from the defaults and decide the result."""

from dataclasses import dataclass
from typing import Any

import pytest

from hpctrain.config.identity import IDENTITY_VERSION, changeable, identity, signature
from hpctrain.config.schema import Config, DataConfig, TrainConfig
from hpctrain.config.schema.key import key, keys, section

# The keys that decide the result, with the defaults that they have in identity version VERSION.
VERSION = 1
DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "model": {},
    "task": {},
    "data.train_split": "train",
    "data.val_split": "val",
    "data.val_splits": [],
    "data.fields": None,
    "data.windows.field": None,
    "data.windows.length": 1025,
    "data.windows.stride": None,
    "data.windows.documents": False,
    "data.images.field": None,
    "data.images.size": None,
    "data.images.fit": "exact",
    "data.images.channels": 3,
    "data.mixture": [],
    "data.temperature": 1.0,
    "data.shuffle": "full",
    "data.block_size": None,
    "data.window": 64,
    "data.lanes": 1,
    "data.subset": None,
    "data.fold": None,
    "data.group": None,
    "data.balance": None,
    "data.weights": None,
    "data.buckets.field": None,
    "data.buckets.window": 8192,
    "data.buckets.size": None,
    "data.repeat": 1,
    "data.collate": "pad",
    "data.tail": "drop",
    "data.transforms": [],
    "data.batch_transforms": [],
    "data.val_transforms": None,
    "data.val_batch_transforms": None,
    "optimizer._target_": "torch.optim.AdamW",
    "optimizer.lr": 0.001,
    "optimizer.lr_scaling": "none",
    "optimizer.base_batch_size": None,
    "optimizer.weight_decay": 0.0,
    "optimizer.options": {},
    "optimizer.groups": [],
    "optimizer.layer_decay": None,
    "scheduler.kind": "cosine",
    "scheduler.warmup_steps": 0,
    "scheduler.warmup_samples": None,
    "scheduler.warmup_epochs": None,
    "scheduler.final_ratio": 0.0,
    "scheduler.decay_fraction": 0.2,
    "scheduler.decay_shape": "linear",
    "scheduler.rise_fraction": 0.3,
    "scheduler.initial_ratio": 0.04,
    "scheduler.plateau.metric": "val/loss",
    "scheduler.plateau.factor": 0.1,
    "scheduler.plateau.patience": 5,
    "scheduler.plateau.mode": None,
    "scheduler.plateau.min_delta": 0.0,
    "scheduler._target_": None,
    "scheduler.options": {},
    "hooks": [],
    "train.global_batch_size": 64,
    "train.batch_size_ramp": [],
    "data.val_sets": [],
    "train.max_epochs": None,
    "train.max_steps": None,
    "train.clip_norm": 1.0,
    "train.eval_every": None,
    "train.eval_every_s": None,
    "train.ema": None,
    "train.ema_evaluation": True,
    "train.early_stopping.metric": None,
    "train.early_stopping.patience": 5,
    "train.early_stopping.mode": None,
    "train.early_stopping.min_delta": 0.0,
    "train.lora.match": None,
    "train.lora.rank": 8,
    "train.lora.alpha": 16.0,
    "train.lora.dropout": 0.0,
    "train.lora.also": [],
    "train.lora.quantize": None,
    "train.compression.kind": "none",
    "train.compression.start_step": 0,
    "train.compression.rank": 4,
    "train.compression.ratio": 0.01,
    "train.compression.final_ratio": None,
    "train.compression.ratio_steps": 1000,
    "train.local_sgd.every": None,
    "train.local_sgd.start_step": 0,
    "train.local_sgd.outer_lr": 1.0,
    "train.local_sgd.outer_momentum": 0.0,
    "train.sync_batchnorm": False,
    "precision.compute": "fp32",
    "precision.params": "fp32",
    "precision.reduce": None,
    "checkpoint.init_digest": None,
    "checkpoint.init_rename": [],
    "checkpoint.init_skip": [],
    "checkpoint.branch_digest": None,
}


def problems(schema: type) -> list[str]:
    """Return what has to be corrected where `schema` and DEFAULTS do not agree."""
    now = {member.name: member.default for member in keys(schema) if member.identity}
    raise_it = "raise IDENTITY_VERSION (every run gets a new name: tell it in CHANGELOG.md)"
    return [
        *(f"{k} no longer decides the result: {raise_it}" for k in DEFAULTS.keys() - now.keys()),
        *(
            f"the default of {k} was {DEFAULTS[k]!r} and is {now[k]!r}: {raise_it}"
            for k in DEFAULTS.keys() & now.keys()
            if DEFAULTS[k] != now[k]
        ),
        *(
            f'{k} is new: add `"{k}": {now[k]!r},` to DEFAULTS; if an older release had the key '
            f"with identity=False, {raise_it}"
            for k in now.keys() - DEFAULTS.keys()
        ),
    ]


def test_a_default_may_change_only_together_with_the_version() -> None:
    assert not problems(Config), "\n".join([*problems(Config), "then correct the table here"])
    assert IDENTITY_VERSION == VERSION, "correct VERSION and DEFAULTS in this file together"


@dataclass
class OtherTrain(TrainConfig):
    clip_norm: float | None = key(0.5, "Another default.")


@dataclass
class OtherConfig(Config):
    train: OtherTrain = section(OtherTrain)


@dataclass
class LaterTrain(TrainConfig):
    swa: float = key(0.0, "A key of a later release.", at_least=0)


@dataclass
class Extra:
    depth: int = key(1, "A key of a later section.")


@dataclass
class LaterConfig(Config):
    train: LaterTrain = section(LaterTrain)
    extra: Extra = section(Extra)
    tags: list[str] = key([], "A later key with a list.")


def test_a_changed_default_is_noticed() -> None:
    (problem,) = problems(OtherConfig)
    assert "the default of train.clip_norm was 1.0 and is 0.5: raise IDENTITY_VERSION" in problem


def test_keys_of_later_releases_do_not_rename_a_run() -> None:
    model = {"_target_": "my.Net", "width": 3}
    before = Config(seed=3, model=model, train=TrainConfig(max_steps=5))
    after = LaterConfig(seed=3, model=model, train=LaterTrain(max_steps=5))
    assert signature(after, "d") == signature(before, "d")
    after.train.swa = 0.9
    assert signature(after, "d") != signature(before, "d")


def test_the_signature_is_fixed() -> None:
    """Unless IDENTITY_VERSION changes, a release finds the runs of the previous release."""
    config = Config(seed=1, model={"_target_": "my.Net"}, data=DataConfig(subset="::2"))
    assert identity(config, "digest") == {
        "identity_version": 1,
        "data_digest": "digest",
        "seed": 1,
        "model": {"_target_": "my.Net"},
        "data.subset": "::2",
    }
    assert signature(config, "digest") == "bc5bb89a"


def test_the_digest_stands_for_places_and_files() -> None:
    parts = [{"name": "a", "path": "/here", "weight": 2}]
    config = Config(data=DataConfig(path="/here", mixture=parts, subset="/here/chosen.npy"))
    moved = Config(data=DataConfig(path="/there", mixture=[{**parts[0], "path": "/there"}]))
    moved.data.subset = "/there/chosen.npy"
    assert identity(moved, "d") == identity(config, "d")
    assert identity(config, "d")["data.mixture"] == [{"name": "a", "weight": 2}]
    assert "data.subset" not in identity(config, "d")
    assert config.data.mixture == parts


@pytest.mark.parametrize(
    "name",
    ["train.accumulate", "train.log_every", "data.prefetch_mb", "data.workers", "parallel", "site"],
)
def test_speed_memory_and_places_are_not_part_of_it(name: str) -> None:
    assert name in changeable()


def test_a_section_outside_excludes_its_keys() -> None:
    inside = {member.name for member in keys(Config) if member.identity}
    assert not {name for name in inside if name.startswith(("parallel.", "site.container."))}
