"""What a config of another program becomes here: choices, values, and what has no counterpart."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from typing import Any

import yaml

from hpctrain.terminal import printable


@dataclass
class Translation:
    """The overrides that a config becomes."""

    # Of each config group, such as `{"parallel": "zero3"}`.
    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # of each dotted key
    # `KEY=VALUE` of the other program without a counterpart, each with the reason.
    left: dict[str, str] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        """Return the arguments of a command line."""
        made = [f"{group}={choice}" for group, choice in self.choices.items()]
        for key, value in self.values.items():
            new = key.startswith("optimizer.options.")  # Hydra asks for ++ before such keys
            made.append(f"{'++' * new}{key}={_as_override(value)}")
        return made

    def yaml(self, title: str) -> str:
        """Return the text of a file for conf/experiment."""
        tree: dict[str, Any] = {}
        if self.choices:
            tree["defaults"] = [{f"override /{g}": choice} for g, choice in self.choices.items()]
        for key, value in self.values.items():
            *sections, name = key.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
        lines = ["# @package _global_", f"# {title}"]
        if self.left:
            lines += ["# Without a counterpart:", *(f"#   {line}" for line in self.reasons())]
        text: str = yaml.safe_dump(tree, sort_keys=False)
        return "\n".join([*lines, text])

    def reasons(self) -> list[str]:
        """Return one line per key without a counterpart."""
        return [" ".join(f"{name}: {reason}".split()) for name, reason in self.left.items()]


def _as_override(value: Any) -> str:
    """Return a value in the words of Hydra's command line."""
    if isinstance(value, list):
        return "[" + ",".join(map(_as_override, value)) + "]"
    words = ("null", "true", "false", "nan", "inf")
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[A-Za-z_][\w.-]*", value, re.ASCII) and value.lower() not in words:
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def show(translation: Translation, options: argparse.Namespace) -> None:
    """Print a translation as the options of the command say."""
    if options.overrides:
        print(shlex.join(translation.overrides()))
        for line in translation.reasons():
            print(f"without a counterpart: {line}", file=sys.stderr)
    else:
        title = f"Translated from {printable(options.file.name)}"
        print(translation.yaml(title), end="")
