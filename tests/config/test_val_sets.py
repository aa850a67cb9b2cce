"""Validation sets of other data sets: their form, the names of their metrics, and their digests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.config.frozen import with_absolute_paths
from hpctrain.config.identity import identity
from hpctrain.config.rules.metrics import names
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate
from hpctrain.data.shards.format import write_shards
from hpctrain.engine.job.run_page import data_sets
from hpctrain.errors import ConfigError, DataError
from hpctrain.runs.data_digest import data_digest


def write(folder: Path, split: str, **fields: Any) -> Path:
    given = {"image": np.zeros((6, 1, 8, 8), "uint8"), "label": np.arange(6)} | fields
    write_shards(folder, [(split, {name: x for name, x in given.items() if x is not None})])
    return folder


def composed(composer: Any, digits: Path, sets: str) -> Config:
    overrides = ["experiment=digits", f"data.path={digits}", f"data.val_sets=[{sets}]"]
    config: Config = with_absolute_paths(composer.typed(overrides))
    return config


def digest_of(config: Config) -> str:
    return data_digest(config.data, config.train, config.task)


def test_each_set_has_metrics_and_is_part_of_the_run(
    composer: Any, digits: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", "test")
    sets = f"{{name: other, path: {other}, split: test}}"
    config = composed(composer, digits, sets)
    validate(config)
    found = names(config) or ()
    assert {"val/loss", "val/other/loss", "val/other/accuracy"} <= {*found}
    assert config.data.other_sets == {"other": (str(other), "test")}
    contexts = [(facts["name"], facts["context"]) for facts in data_sets(config.data)]
    assert contexts == [("digits", "training"), ("other", "evaluation")]
    # The name of the run follows from the samples, not from where they are.
    digest = digest_of(config)
    assert digest != digest_of(composed(composer, digits, ""))
    moved = other.rename(tmp_path / "moved")
    again = composed(composer, digits, sets.replace(str(other), str(moved)))
    assert identity(again, digest_of(again)) == identity(config, digest)
    changed = write(tmp_path / "changed", "test", label=np.arange(1, 7))
    third = composed(composer, digits, sets.replace(str(other), str(changed)))
    assert digest_of(third) != digest


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("{name: other}", "must be {name: ..., path: ..., split: ...}, of which path or split"),
        ("{name: a, path: b, weight: 1}", "/b', 'weight': 1}: it must be {name: ..., path: ..."),
        ("{name: a/b, path: b}", "data.val_sets[0].name=a/b: it is a part of the names of metrics"),
        (
            "{name: a, path: b},{name: a, path: c}",
            "data.val_sets[1].name=a: another set has this name",
        ),
    ],
)
def test_a_set_of_another_form_is_refused(
    composer: Any, digits: Path, sets: str, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(composed(composer, digits, sets))
    assert said in str(raised.value)


def test_a_set_that_does_not_fit_is_refused(composer: Any, digits: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", "test")
    blank = write(tmp_path / "blank", "val", label=None)
    for sets, said in (
        (f"{{name: a, path: {tmp_path}/none}}", r"data.val_sets\[0\].path: "),
        (f"{{name: a, path: {other}}}", "data.val_split=val: .*other: "),
        (f"{{name: a, path: {other}, split: dev}}", r"data.val_sets\[0\].split=dev: .*test"),
        (f"{{name: a, path: {blank}}}", "task.target=label: the samples have image"),
    ):
        with pytest.raises((ConfigError, DataError), match=said):
            digest_of(composed(composer, digits, sets))
