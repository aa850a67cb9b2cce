"""What tests read from a data set that a command has written."""

import json
from pathlib import Path

import numpy as np

from hpctrain.data.shards.index import Index
from hpctrain.data.sources.reader import Reader


def rows(folder="OUT", split="train"):
    """Return all samples of a split, by field."""
    reader = Reader(folder, split)
    return reader.read(np.arange(len(reader)))


def fields(folder="OUT"):
    """Return the fields of a data set in words, by name."""
    return {name: str(field) for name, field in Index.load(Path(folder)).fields.items()}


def as_text(ragged):
    """Return the texts of a variable-length field of bytes."""
    return [ragged[i].tobytes().decode() for i in range(len(ragged))]


def problems(folder="OUT"):
    """Return the records that could not be used: (record, reason)."""
    lines = (Path(folder) / "problems.jsonl").read_text().splitlines()
    return [(p["record"], p["reason"]) for p in map(json.loads, lines)]


def function_of_the_page(name):
    """Write a file that docs/data.md shows."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    (_, text) = page.split(f'```python title="{name}"\n')
    Path(name).write_text(text.split("```")[0])
