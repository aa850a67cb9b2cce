"""What a config of another program becomes here: choices, values, and what has no counterpart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass
class Translation:
    """What a config becomes."""

    # Of each config group, such as `{"parallel": "zero3"}`.
    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # of each dotted key
    # `KEY=VALUE` of the other program without a counterpart, each with the reason.
    left: dict[str, str] = field(default_factory=dict)

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
        lines += ["# Without a counterpart:"] if self.left else []
        for name, why in self.left.items():  # on one line: another would be a key
            lines.append(f"#   {' '.join(f'{name}: {why}'.split())}")
        text: str = yaml.safe_dump(tree, sort_keys=False)
        return "\n".join([*lines, text])
