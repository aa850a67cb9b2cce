"""Tests of the reference of the config keys, which is made from the schema."""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from operator import attrgetter
from typing import Any

import omegaconf
import pytest

from hpctrain.config.explain import OTHER_NAMES
from hpctrain.config.frozen import known_keys
from hpctrain.config.rules.combinations import refused
from hpctrain.config.schema import Config
from hpctrain.config.schema.key import REQUIRED, Rule, keys, members
from hpctrain.errors import ConfigError
from hpctrain.insight.reference.keys import COLUMNS, show

# The key without which the others of its section do nothing.
SWITCHES = {"train.lora": "match", "data.windows": "field", "data.images": "field"}
SWITCHES |= {"train.early_stopping": "metric", "train.compression": "kind"}
SWITCHES |= {"train.local_sgd": "every"}


def lines(capsys: pytest.CaptureFixture[str], *names: str) -> dict[str, dict[str, str]]:
    show(names)
    cells = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in cells}


def dotted(section: Any, prefix: str = "") -> Iterator[str]:
    for name, value in vars(section).items():
        if is_dataclass(value):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_is_there_with_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "keys")
    assert list(found) == list(dotted(Config()))
    for name, row in found.items():
        assert row["type"], name
        assert row["meaning"].endswith("."), name
        assert len(row["meaning"].split()) >= 3, name
        assert "\n" not in row["meaning"], name


@pytest.mark.parametrize(
    ("words", "some", "others"),
    [
        (["warmup"], ["scheduler.warmup_steps", "scheduler.warmup_epochs"], ["optimizer.lr"]),
        (["Learning", "rate"], ["optimizer.lr", "scheduler.warmup_steps"], ["data.path"]),
        (["global batch size"], ["train.global_batch_size"], ["train.clip_norm"]),
        (["early-stopping"], ["train.early_stopping.patience"], ["train.max_steps"]),
        (["pyxis"], ["site.container.runtime"], ["site.partition"]),  # an allowed value
        (["gradient_clip_val"], ["train.clip_norm"], ["train.max_steps"]),  # Lightning's name
        (["amp"], ["precision.compute"], ["data.subset"]),  # torch's, and no part of "samples"
        (["lr_scheduler_type"], ["scheduler.kind"], ["optimizer.lr"]),  # Hugging Face's
        (["seed", "warmup"], ["seed", "scheduler.warmup_steps"], ["optimizer.lr"]),
    ],
)
def test_words_find_keys(
    capsys: pytest.CaptureFixture[str], words: list[str], some: list[str], others: list[str]
) -> None:
    found = lines(capsys, *words)
    assert {*some} <= {*found}
    assert not {*others} & {*found}


def test_names_of_other_tools_are_those_of_keys() -> None:
    known = {member.name for member in members(Config)}
    for name, ours in OTHER_NAMES.items():
        assert ours in known or ours in ("debug=fast", "task.label_smoothing"), name
        assert name not in known


def test_every_section_describes_itself() -> None:
    for member in members(Config):
        assert member.rule.text.endswith("."), member.name


def test_what_is_printed_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, "scheduler", "data.prefetch_mb", "site.container.runtime", "data.path")
    assert list(found)[:2] == ["data.path", "data.prefetch_mb"]
    assert found["data.path"]["default"] == "(required)"
    assert found["data.prefetch_mb"] | {"meaning": ""} == {
        "key": "data.prefetch_mb",
        "type": "float",
        "default": "64.0",
        "unit": "MB",
        "allowed": "at least 0",
        "identity": "",
        "meaning": "",
    }
    assert found["scheduler.kind"]["allowed"] == "constant, linear, cosine, wsd, one_cycle, plateau"
    assert found["scheduler.kind"]["identity"] == "identity"
    assert found["scheduler.warmup_steps"]["allowed"] == "at least 0"
    assert found["scheduler.final_ratio"]["allowed"] == "at least 0 and at most 1"
    runtimes = "null, apptainer, singularity, pyxis, command"
    assert found["site.container.runtime"]["allowed"] == runtimes


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("data.stagedir", "did you mean data.stage_dir?"),
        ("trian", "did you mean train?"),
        ("xyz", "xyz: there is none of this name, and none has this word in its meaning; at the"),
        ("fast_dev_run", "did you mean debug=fast?"),
        ("warmup xyz", "warmup xyz: there is none of this name, and none has these words in its"),
    ],
)
def test_an_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        show(name.split())


def test_on_a_terminal_of_80_columns_a_key_is_a_line_and_its_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(["optimizer"])
    shown = capsys.readouterr().out.splitlines()
    assert "optimizer.lr=0.001  float; greater than 0; part of the run's name" in shown
    assert "    The learning rate has this value after warm-up, unless lr_scaling changes" in shown
    assert max(map(len, shown)) <= 80
    assert len(shown) < 40


def test_a_required_key_is_one_for_omegaconf() -> None:
    assert REQUIRED == omegaconf.MISSING


def test_defaults_are_allowed() -> None:
    for member in keys(Config):
        if member.name != "data.path":
            assert member.rule.problem(member.name, member.default) == ""


@pytest.mark.parametrize(
    ("rule", "value", "problem"),
    [
        (Rule("", choices=("a", None)), "b", "k=b: allowed are a, null"),
        (Rule("", choices=("a", None)), None, ""),
        (Rule("", at_least=1), 0, "k=0: it must be at least 1"),
        (Rule("", at_least=1), float("nan"), "k=nan: it must be at least 1"),
        (Rule("", at_least=1), 2**62, f"k={2**62}: it must be less than 2^62"),
        (Rule("", at_least=1), None, ""),
        (Rule("", above=0), 0.0, "k=0.0: it must be greater than 0"),
        (Rule("", above=0), float("inf"), "k=inf: it must be less than 2^62"),
        (Rule("", at_least=0, at_most=1), 1.5, "k=1.5: it must be at least 0 and at most 1"),
        (Rule("", at_least=0, at_most=1), 1, ""),
        (Rule("", above=0, below=1), 1, "k=1: it must be greater than 0 and less than 1"),
        (Rule("", check=lambda value: f"not {value}"), "x", "k='x': not x"),
    ],
)
def test_rules(rule: Rule, value: object, problem: str) -> None:
    assert rule.problem("k", value) == problem


def test_a_config_gets_lists_and_dicts_of_its_own() -> None:
    one, other = Config(), Config()
    one.model["a"] = 1
    one.site.modules.append("x")
    assert other.model == {}
    assert other.site.modules == []
    assert Config().site.modules == []


def test_sections_come_before_their_keys() -> None:
    names = known_keys()
    assert names.index("data") < names.index("data.windows") < names.index("data.windows.length")


def test_each_key_of_a_section_with_a_switch_needs_it() -> None:
    config = Config()
    for member in keys(Config):
        section, _, name = member.name.rpartition(".")
        if section in SWITCHES and name != SWITCHES[section]:
            other = replace(attrgetter(section)(config), **{name: "other"})
            outer, _, inner = section.rpartition(".")
            node = replace(attrgetter(outer)(config), **{inner: other})
            made = replace(config, **{outer: node})
            found = [*refused(made, "adapter_keys"), *refused(made, "idle_keys")]
            assert [text.partition("=")[0] for text in found] == [member.name]
