"""What has left says so: each line of `hpctrain/base/gone.yaml`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import data_prep.cli
from hpctrain import cli
from hpctrain.base.gone import table
from hpctrain.config.composing.compose import compose
from hpctrain.config.explain import unknown_key
from hpctrain.config.frozen import _Dumper, known_keys, load
from hpctrain.errors import ConfigError
from tests.conftest import ROOT

KEYS = {name: left["default"] for name, left in table().items() if "default" in left}
CHOICES = [name for name in table() if "=" in name]
COMMANDS = [name for name in table() if name.startswith(("hpctrain ", "data_prep "))]
# A run that was frozen by the first version has most of these keys.
OLD = (ROOT / "tests/corpus/0.1.0/runs/digits-0db66357/config.yaml").read_text()


def test_each_line_is_a_key_a_choice_or_a_command_that_is_not_there_any_more() -> None:
    assert len(KEYS) + len(CHOICES) + len(COMMANDS) == len(table())
    sweeper = yaml.safe_load((ROOT / "conf/hydra/sweeper/optuna.yaml").read_text())
    assert not {*KEYS} & {*known_keys(), *(f"hydra.sweeper.{name}" for name in sweeper)}
    known = {f"hpctrain {name}" for name in cli.COMMANDS}
    assert not {*COMMANDS} & (known | {f"data_prep {name}" for name in data_prep.cli.COMMANDS})
    for name in CHOICES:
        group, _, choice = name.partition("=")
        assert not (ROOT / "conf" / group / f"{choice}.yaml").exists(), name
    for name, left in table().items():
        assert {*left} <= {"default", "instead"}, name
        assert left["instead"].strip().endswith((".", ")")), name


@pytest.mark.parametrize("name", [*KEYS, *CHOICES][:1] + CHOICES[:1])
def test_a_command_line_with_one(name: str) -> None:
    typed = name if "=" in name else f"{name}=1"
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=digits", typed])
    assert str(caught.value) == f"{name} has left hpctrain: {table()[name]['instead']}"


def test_a_section_of_which_nothing_is_left() -> None:
    for name in KEYS:
        section = name.partition(".")[0]
        if section not in known_keys():
            assert str(table()[name]["instead"]) in unknown_key(section, known_keys())
        assert str(table()[name]["instead"]) in unknown_key(name, known_keys())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_or_an_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = name.split()
    if program == "data_prep":
        assert data_prep.cli.main(words) == 2
        said = capsys.readouterr().err
    else:
        with pytest.raises(ConfigError) as caught:
            cli._dispatch(words)
        said = str(caught.value)
    assert " ".join(table()[name]["instead"].split()) in " ".join(said.split())


def frozen(path: Path, keys: dict[str, Any]) -> Path:
    """Write a config of before with these keys."""
    values = yaml.safe_load(OLD)
    for name, value in keys.items():
        *sections, last = name.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    path.write_text(yaml.dump(values, Dumper=_Dumper))  # as `freeze` does
    return path


def test_a_frozen_config_of_before_with_what_was_usual(tmp_path: Path) -> None:
    load(frozen(tmp_path / "config.yaml", KEYS))


@pytest.mark.parametrize("name", KEYS)
def test_a_frozen_config_of_before(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = frozen(tmp_path / "config.yaml", {name: "another"})
    said = f"{path}: {name}=another: {name} has left hpctrain: "
    if name.startswith(("launch.", "site.", "network.", "evaluation.", "hardware.", "notify.")):
        load(path)
        assert said in caplog.text
        return
    with pytest.raises(ConfigError, match=f"^{said}"):
        load(path)


def test_a_frozen_choice_of_how_jobs_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.yaml"
    values = yaml.safe_load(OLD) | {"launch": {"rerun": "queued"}}
    path.write_text(yaml.dump(values, Dumper=_Dumper))
    assert load(path).launch.rerun == "failed"
    assert "launch.rerun=queued: launch.rerun=queued has left hpctrain: `cancel`" in caplog.text
