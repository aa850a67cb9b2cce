"""This module provides a source whose records a test gives as rows.

It is not in a test file, because worker processes import it.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.options import Options
from data_prep.source import BadRecords, InputSource, Piece, SampleBlock
from data_prep.writing.split import parse_split
from hpctrain.data.shards.field import Field

BLOCK = 3


class Row(NamedTuple):
    """A record of the source. If `bad` is not empty, it says why the record cannot be used."""

    x: float
    label: int = 0
    text: str = ""
    split: str = ""
    key: bytes | None = None
    bad: str = ""


@dataclass(frozen=True)
class Hand(InputSource):
    """A source whose pieces are lists of rows. `act` says how it fails when piece 1 is read."""

    act: str = ""

    def read(self, what: tuple[str, Sequence[Row]], reading: BadRecords) -> Iterator[SampleBlock]:
        file, rows = what
        if file.endswith("1"):
            self.misbehave()
        for start in range(0, len(rows), BLOCK):
            numbers, used = [], []
            for number, row in enumerate(rows[start : start + BLOCK], start):
                if row.bad:
                    reading.bad(file, f"row {number}", row.bad)
                else:
                    numbers.append(f"row {number}")
                    used.append(row)
            if used:
                yield SampleBlock(
                    {
                        "x": np.array([row.x for row in used], np.float64),
                        "label": np.array([row.label for row in used], np.int64),
                        "text": [np.frombuffer(row.text.encode(), np.uint8) for row in used],
                    },
                    keys=None if used[0].key is None else [row.key or b"" for row in used],
                    column=[row.split for row in used],
                    file=file,
                    records=numbers.__getitem__,
                )

    def misbehave(self) -> None:
        what, _, value = self.act.partition(":")
        match what:
            case "kill":
                os.kill(os.getpid(), int(value))
            case "raise":
                raise Odd(1, 2)
            case "oserror":
                Path(value).read_bytes()
            case "change":
                with open(value, "ab") as file:
                    file.write(b"more")


class Odd(Exception):
    """An exception that cannot be unpickled, because unpickling passes one argument, not two."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


def hand(*pieces: Sequence[Row], act: str = "", **more: Any) -> Hand:
    """Return a source of these pieces, whose files are named f0, f1 and so on.

    `more` may hold `files`, the source files of each piece; `nbytes`, the size that each piece
    claims; and `folders`, the folders that the source reads.
    """
    files = more.pop("files", ())
    return Hand(
        name="hand",
        fields={
            "x": Field("float64"),
            "label": Field("int64"),
            "text": Field("uint8", variable=True),
        },
        pieces=[
            Piece((f"f{number}", tuple(rows)), files, bytes=more.get("nbytes", 8 * len(rows)))
            for number, rows in enumerate(pieces)
        ],
        columns=("split",),
        act=act,
        folders=more.get("folders", ()),
    )


def options(split: str = "train=1", **more: Any) -> Options:
    """Return the options of a conversion: the text of --split, and other options by their name."""
    given = {"shard_bytes": 10_000, "quiet": True, "command": "it"} | more
    return Options(split=parse_split(split), **given)
