# ruff: noqa: RUF009 (`key` and `section` return dataclass fields)
"""The name of a run depends on the values that differ from the defaults and decide the result."""

from dataclasses import dataclass
from typing import Any

import yaml

from hpctrain.base.gone import table
from hpctrain.config.identity import IDENTITY_VERSION, chosen, identity, signature
from hpctrain.config.schema import Config, DataConfig, TrainConfig
from hpctrain.config.schema.key import key, keys, section

# The keys that decide the result, with the defaults that they have in identity version VERSION.
VERSION = 1
DEFAULTS: dict[str, Any] = {
    f"{section}.{name}".lstrip("."): default
    for section, defaults in yaml.safe_load("""
  '': {loop: {_target_: hpctrain.supervised}, seed: 0, model: {}, task: {}, hooks: []}
  data: {train_split: train, val_split: val, fields: null, mixture: [],
    shuffle: full, window: 64, subset: null,
    fold: null, group: null, balance: null, repeat: 1, collate: pad, tail: drop,
    transforms: [], batch_transforms: [], val_transforms: null, val_batch_transforms: null,
    val_sets: []}
  data.windows: {field: null, length: 1025, stride: null, documents: false}
  data.images: {field: null, size: null, fit: exact}
  data.buckets: {field: null}
  optimizer: {_target_: torch.optim.AdamW, lr: 0.001, lr_scaling: none, base_batch_size: null,
    weight_decay: 0.0, options: {}, groups: [], layer_decay: null}
  scheduler: {kind: cosine, warmup_steps: 0, warmup_samples: null, warmup_epochs: null,
    final_ratio: 0.0, decay_fraction: 0.2, decay_shape: linear, rise_fraction: 0.3,
    initial_ratio: 0.04, _target_: null, options: {}}
  scheduler.plateau: {metric: val/loss, factor: 0.1, patience: 5, mode: null, min_delta: 0.0}
  train: {global_batch_size: 64, batch_size_ramp: [], max_epochs: null, max_steps: null,
    clip_norm: 1.0, eval_every: null, eval_every_s: null, ema: null, ema_evaluation: true,
    sync_batchnorm: false}
  train.early_stopping: {metric: null, patience: 5, mode: null, min_delta: 0.0}
  train.lora: {match: null, rank: 8, alpha: 16.0, dropout: 0.0, also: [], quantize: null}
  train.compression: {kind: none, start_step: 0, rank: 4, ratio: 0.01, final_ratio: null,
    ratio_steps: 1000}
  train.local_sgd: {every: null, start_step: 0, outer_lr: 1.0, outer_momentum: 0.0}
  precision: {compute: fp32, params: fp32, reduce: null}
  checkpoint: {init_digest: null, init_rename: [], init_skip: [], branch_digest: null}
""").items()
    for name, default in defaults.items()
}


def problems(schema: type) -> list[str]:
    """Return what has to be corrected where `schema` and DEFAULTS do not agree."""
    now = {member.name: member.default for member in keys(schema) if member.identity}
    raise_it = "raise IDENTITY_VERSION (every run gets a new name: tell it in CHANGELOG.md)"
    return [
        # A config with a value of a key that has left is refused, so no run gets another name.
        *(
            f"{k} no longer decides the result: {raise_it}"
            for k in DEFAULTS.keys() - now.keys()
            if table().get(k, {}).get("default", "") != DEFAULTS[k]
        ),
        *(
            f"the default of {k} was {DEFAULTS[k]!r} and is {now[k]!r}: {raise_it}"
            for k in DEFAULTS.keys() & now.keys()
            if DEFAULTS[k] != now[k]
        ),
        *(
            f"{k} is new: add it with {now[k]!r} to DEFAULTS; if an older release had the key "
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


def test_what_differs_and_what_was_named_is_chosen() -> None:
    config = Config()
    config.optimizer.lr *= 2
    config.model = {"_target_": "m.Net", "width": 3}
    assert chosen(config) == {"model": config.model, "optimizer.lr": config.optimizer.lr}
    # A sweep over seeds has the default among its values.
    named = chosen(config, ["++seed=0", "experiment=digits", "optimizer.lr=1"])
    assert named == {**chosen(config), "seed": 0}
