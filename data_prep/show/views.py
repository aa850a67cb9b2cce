"""What is said and drawn of a field: its statistics, some samples, and values for a distribution.

The samples are evenly spaced over the split and the same each time. No other samples are read.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.datasets.dataset import DataSet, evenly
from data_prep.show.images import SIGNATURES, as_image, is_text, stretched
from hpctrain.shards.field import Field
from hpctrain.shards.index import Split, Statistics
from hpctrain.shards.types import Array
from hpctrain.terminal import printable

SAMPLES = 512  # the most samples of a split for the distribution of values
_LENGTHS = 2**21  # roughly the most samples whose lengths are counted
_READ_BYTES = 64 * 2**20  # roughly the most bytes of these samples
SHOWN = 24  # the most samples that are drawn


@dataclass(frozen=True)
class Summary:
    """The statistics of a field in a split."""

    split: str
    count: int  # samples
    name: str
    field: Field
    values: Statistics

    @property
    def not_finite(self) -> str:
        """`12 NaN, 3 infinite`, "0", or "-" if there are no statistics."""
        bad, nan = self.values.nonfinite, self.values.nan
        if not bad:
            return "-" if self.values.mean is None and self.values.min is None else "0"
        counts = {"NaN": nan, "infinite": bad - nan}
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


@dataclass
class View:
    """The data to draw for a field."""

    name: str
    field: Field
    categories: Sequence[str]  # the names of its values 0, 1, …; empty if there are none
    summaries: dict[str, Summary]  # the summaries of the field by split
    label: str  # the field that the captions come from; "": the captions are the samples' numbers
    captions: list[str]  # the caption of each sample
    samples: list[Array]  # samples of the first split; empty for a variable-length field
    # The samples as uint8 (H, W, C) with C 1, 3 or 4; empty if they are no images.
    pictures: list[Array]
    # Values of more samples by split, (n,); lengths for a variable-length field.
    values: dict[str, Array]


def class_name(value: int, names: Sequence[str]) -> str:
    """Return the name of a class, or "" where it has none."""
    return names[value] if 0 <= value < len(names) else ""


def views(data: DataSet, splits: Sequence[Split], summaries: Sequence[Summary]) -> Iterator[View]:
    """Yield the data to draw for each field of the summaries."""
    shown = evenly(splits[0].count, SHOWN)
    captions = [str(number) for number in shown]
    # The captions are the field whose values have names, or that has the fewest classes.
    named = [name for name in data.index.fields if data.categories(name)]
    counts = {s.name: len(s.values.classes) for s in summaries if s.values.classes}
    label = next(iter([*named, *sorted(counts, key=lambda name: counts[name])]), "")
    if label:
        names, fields = data.categories(label), data.fields([label])
        values = [int(sample[label]) for _, sample in data.take(splits[0], fields, shown)]
        captions = [printable(class_name(value, names)) or str(value) for value in values]
    for name in dict.fromkeys(summary.name for summary in summaries):
        field = data.index.fields[name]
        samples, pictures = _samples(data, splits[0], name, shown)
        yield View(
            *(name, field, data.categories(name)),
            summaries={s.split: s for s in summaries if s.name == name},
            label=label,
            captions=captions,
            samples=[] if field.variable else samples,
            pictures=pictures,
            values={split.name: _values(data, split, name) for split in splits},
        )


def _samples(
    data: DataSet, split: Split, name: str, shown: Sequence[int]
) -> tuple[list[Array], list[Array]]:
    """Return samples and, if they are images, their pictures."""
    field = data.index.fields[name]
    if not field.shape and not is_text(field):
        return [], []
    if is_text(field):
        ((_, first),) = data.take(split, {name: field}, shown[:1])
        if not first[name].tobytes().startswith(tuple(SIGNATURES)):
            return [], []
    samples = [sample[name] for _, sample in data.take(split, {name: field}, shown)]
    if is_text(field):
        return samples, _decoded(samples)
    images = [image for sample in samples if (image := as_image(sample, field)) is not None]
    high = max((int(image.max()) for image in images), default=0)
    return samples, [stretched(image, high) for image in images]


def _decoded(files: Sequence[Array]) -> list[Array]:
    try:
        from PIL import Image

        images = []
        for file in files:
            with Image.open(io.BytesIO(file.tobytes())) as image:
                small = image.convert("RGB")
                small.thumbnail((256, 256))
                images.append(np.asarray(small))
        return images
    except Exception:  # the bytes are no image; Pillow raises many types of exceptions
        return []


def _values(data: DataSet, split: Split, name: str) -> Array:
    field = data.index.fields[name]
    fields = {name: field}
    if field.variable:
        most = max(1, _LENGTHS * len(split.shards) // max(_LENGTHS, split.count))
        parts = []
        for i in evenly(len(split.shards), most):
            with data.open(split.shards[i], fields) as opened:
                parts.append(opened.lengths(name, 0, min(split.shards[i].count, _LENGTHS)))
        return np.concatenate(parts)
    most = SAMPLES if field.shape else 16 * SAMPLES
    most = max(1, min(most, _READ_BYTES // field.nbytes))
    if split.count <= most:  # all samples: blocks are faster than single samples
        blocks = data.blocks(split, fields)
        return np.concatenate([np.asarray(block[name]).reshape(-1) for block in blocks])
    found = data.take(split, fields, evenly(split.count, most))
    return np.concatenate([sample[name].reshape(-1) for _, sample in found])
