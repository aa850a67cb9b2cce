"""Tests of the YAML loader: a text stays what was written, and a file cannot grow without end."""

import math
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.files.yaml_file import LONGEST, parse, read
from hpctrain.errors import ConfigError

TYPES = {"name": "str", "modules": "list[str]", "env": "dict[str, str]", "pin": "bool"}
TYPES |= {"lr": "float", "steps": "int", "nodes": "int | str", "on.on": "str"}
WRITTEN = ("12:00:00", "1.10", "010", "1_000", "0x1F", "on", "No", "1e3", "2024-01-01", "nan")


@pytest.mark.parametrize("text", WRITTEN)
def test_a_key_for_text_gets_what_was_written(text: str) -> None:
    file = f"name: {text}\nmodules: [{text}, 'x']\nenv: {{{text}: {text}}}\non: {{on: {text}}}\n"
    found = parse(file, "file", TYPES)
    assert found["name"] == found["env"][text] == found["on"]["on"] == text
    assert found["modules"] == [text, "x"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1_000", 1000), ("+5", 5), ("-0.5", -0.5), ("1e-3", 0.001), ("5.", 5.0), (".5", 0.5)],
        *[("true", True), ("False", False), ("~", None), ("", None), (".inf", math.inf)],
        *[("!!float 1", 1.0), ("!!str 010", "010"), ("2024-01-01", "2024-01-01"), ("12e", "12e")],
        *[("80:443", "80:443"), ("'no'", "no"), ("=", "="), ("deadbeef", "deadbeef")],
    ],
)
def test_what_no_program_disputes(text: str, value: Any) -> None:
    found = parse(f"- a: {text}", "file")[0]["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("place", ["free: {}", "steps: {}", "lists: [{}]", "nodes: {}", "lr: {}"])
@pytest.mark.parametrize("text", ["12:00:00", "010", "08", "0b1", "0o17", "yes", "off", "1__0"])
def test_what_programs_dispute_is_an_error_with_its_line(place: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^file: line 2: {text}: programs read this in diff"):
        parse("\n" + place.format(text), "file", TYPES)


def test_words_of_truth_and_infinity_where_a_key_wants_them() -> None:
    assert parse("{pin: yes, lr: inf}", "file", TYPES) == {"pin": True, "lr": math.inf}
    assert parse("{010: a, on: b, 1: c}", "file") == {"010": "a", "on": "b", 1: "c"}
    assert parse("b: &b {x: 1, y: 2}\nc: {<<: *b, y: 3}", "f")["c"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "line 2: the key c stands here a second time"),
        ("{1: a, true: b}", "line 1: the key true stands here a second time"),
        ("a: 1e400", "line 1: 1e400: programs read"),
        (f"a: {'9' * 5000}", "line 1: 9999"),
        ("a: !!int 010", "line 1: 010: programs read"),
        ("a: !!python/name:os.system x", "line 1: the tag tag:yaml.org,2002:python/name:os.system"),
        ("a: &a [*a]", "line 1: it has more values than 64 inside each other"),
        ("[" * 100_000, "line 1: it is not YAML (while increasing flow level exceeded maximum"),
        ("- " * 100_000, "line 1: it is not YAML"),
        ("a: \0", "it is not YAML"),
        ("a: 1\n---\nb: 2", "line 2: it is not YAML"),
        ("? [1]\n: 2", "line 1: the name of a key must be"),
        ("x" * (LONGEST + 1), "it is longer than"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "file")
    assert f"file: {reason}" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_bomb_of_aliases_ends_at_once(tmp_path: Path) -> None:
    names = "abcdefghi"
    lines = [f"{n}: &{n} [{','.join(['*' + b] * 9 if b else 'x' * 9)}]" for n, b in
             zip(names, ["", *names], strict=False)]  # fmt: skip
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines))
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"more values than 50,000; each alias"):
        read(file)
    assert time.process_time() - begin < 2
