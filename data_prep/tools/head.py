"""The first samples of a data set as text; see `inspect --head`."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_prep import console
from data_prep.datasets.dataset import DataSet, reader_of
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.types import Array
from hpctrain.data.tokenizer import FILE, loaded

_PRINTED = 16  # the most values of an array that are printed
_CHARACTERS = 200  # the most characters of a text


def show(data: DataSet, args: argparse.Namespace) -> None:
    """Print the first `args.head` samples of each split."""
    fields, tokenizer = data.fields(args.field), _tokenizer(data)
    width = max(map(len, fields))
    for split in data.splits(args.split):
        reader = reader_of(data.folder, fields, split.shards)
        for number in range(min(args.head, split.count)):
            sample = reader.read(np.array([number]))
            console.say(f"{split.name} {number}")
            for name, field in fields.items():
                value = sample[name][0]
                text = describe(value, field, data.categories(name))
                console.say(f"  {name:{width}}  {text}")
                if tokenizer is not None and _is_tokens(field):
                    start = tokenizer.decode(value[:_CHARACTERS].tolist())[:_CHARACTERS]
                    console.say(f"  {'':{width}}  {json.dumps(start, ensure_ascii=False)}")


def describe(value: Array, field: Field, categories: Sequence[str] = ()) -> str:
    """Return one line of text for the value of a field.

    >>> describe(np.array(3), Field("int64"), ["a", "b", "c", "d"])
    '3 (d)'
    """
    if value.ndim == 0:
        known = value.dtype.kind != "f" and 0 <= value < len(categories)
        name = categories[int(value)] if known else ""
        return f"{value} ({name})" if name not in ("", str(value)) else str(value)
    shape = f"{field.dtype}[{', '.join(map(str, value.shape))}]"
    if not value.size:
        return f"{shape}  empty"
    if _is_text(field) and (text := _text(value)) is not None:
        more = "…" if len(text) > _CHARACTERS else ""
        shown = json.dumps(text[:_CHARACTERS], ensure_ascii=False)
        return f"{shown}{more}  {len(value):,} bytes"
    if value.size <= _PRINTED:
        return f"{shape}  {' '.join(str(np.array2string(value, separator=', ')).split())}"
    start = ""
    if value.ndim == 1:
        numbers = ", ".join(f"{number:.4g}" for number in value[: _PRINTED // 2].tolist())
        start = f"  [{numbers}, …]"
    return f"{shape}{start}  {_range(value)}"


def _is_text(field: Field) -> bool:
    """Return whether a field may hold text or files, which are sequences of bytes."""
    return field.variable and field.dtype == "uint8" and not field.shape


def _is_tokens(field: Field) -> bool:
    """Return whether a field may hold the tokens of a text."""
    return field.variable and field.dtype in ("uint16", "uint32") and not field.shape


def _tokenizer(data: DataSet) -> Any:
    """Return the tokenizer that `text` has written beside the shards, or None."""
    try:
        return loaded((data.folder / FILE).read_text(encoding="utf-8"))
    except Exception:  # not there, not installed, or no tokenizer: then only numbers are shown
        return None


def _text(value: Array) -> str | None:
    """Return the beginning of UTF-8 text, or None."""
    start = value[: 4 * _CHARACTERS + 4].tobytes()
    try:
        text = start.decode()
    except UnicodeDecodeError as error:
        if len(start) == len(value) or error.start < len(start) - 3:
            return None
        text = start[: error.start].decode()  # the start ends inside a character
    return None if "\0" in text else text


def _range(value: Array) -> str:
    finite = value[np.isfinite(value)]
    bad = f", {value.size - finite.size:,} not finite" if finite.size < value.size else ""
    if not finite.size:
        return f"nothing finite{bad}"
    return (
        f"{finite.min():.4g} to {finite.max():.4g}, mean {finite.mean(dtype=np.float64):.4g}{bad}"
    )
