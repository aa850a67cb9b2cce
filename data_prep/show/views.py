"""Select what to draw of a data set: samples of each field, and values for its distribution.

The samples are evenly spaced over the split and the same each time. No other samples are read.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.datasets.dataset import DataSet, evenly
from data_prep.show.images import SIGNATURES, as_image, is_text, stretched
from data_prep.show.summary import Summary, class_name
from hpctrain.shards.field import Field
from hpctrain.shards.index import Split
from hpctrain.shards.types import Array
from hpctrain.terminal import printable

SAMPLES = 512  # the most samples of a split for the distribution of values
_READ_BYTES = 64 * 2**20  # roughly the most bytes of these samples
_LENGTHS = 2**21  # roughly the most samples whose lengths are counted
SHOWN = 24  # the most samples that are drawn


@dataclass
class View:
    """The data to draw for a field.

    Attributes:
        name: The name of the field.
        field: The schema of the field.
        categories: The names of its values 0, 1, …; empty if there are none.
        summaries: The summaries of the field by split.
        label: The field that the captions come from; "": the captions are the samples' numbers.
        captions: The caption of each sample.
        samples: Samples of the first split; empty for a variable-length field.
        pictures: The samples as uint8 (H, W, C) with C 1, 3 or 4; empty if they are no images.
        values: Values of more samples by split, (n,); lengths for a variable-length field.
    """

    name: str
    field: Field
    categories: Sequence[str]
    summaries: dict[str, Summary]
    label: str
    captions: list[str]
    samples: list[Array]
    pictures: list[Array]
    values: dict[str, Array]


def views(data: DataSet, splits: Sequence[Split], summaries: Sequence[Summary]) -> Iterator[View]:
    """Yield the data to draw for each field of the summaries."""
    names = list(dict.fromkeys(summary.name for summary in summaries))
    label = _label(data, summaries)
    captions, shown = _captions(data, splits[0], label)
    for name in names:
        field = data.index.fields[name]
        samples, pictures = _samples(data, splits[0], name, shown)
        yield View(
            name,
            field,
            data.categories(name),
            {summary.split: summary for summary in summaries if summary.name == name},
            label,
            captions,
            [] if field.variable else samples,
            pictures,
            {split.name: _values(data, split, name) for split in splits},
        )


def _label(data: DataSet, summaries: Sequence[Summary]) -> str:
    """Return the field for the captions: its values have names, or it has the fewest classes."""
    named = [name for name in data.index.fields if data.categories(name)]
    counts = {s.name: len(s.classes) for s in summaries if s.classes}
    return next(iter([*named, *sorted(counts, key=lambda name: counts[name])]), "")


def _captions(data: DataSet, split: Split, label: str) -> tuple[list[str], list[int]]:
    shown = evenly(split.count, SHOWN)
    if not label:
        return [str(number) for number in shown], shown
    names, fields = data.categories(label), data.fields([label])
    values = [int(sample[label]) for _, sample in data.take(split, fields, shown)]
    return [printable(class_name(value, names)) or str(value) for value in values], shown


def _samples(
    data: DataSet, split: Split, name: str, shown: Sequence[int]
) -> tuple[list[Array], list[Array]]:
    """Return samples and, if they are images, their pictures."""
    field = data.index.fields[name]
    if not field.shape and not is_text(field):
        return [], []
    fields = {name: field}
    if is_text(field):
        ((_, first),) = data.take(split, fields, shown[:1])
        if not first[name].tobytes().startswith(tuple(SIGNATURES)):
            return [], []
    samples = [sample[name] for _, sample in data.take(split, fields, shown)]
    if is_text(field):
        return samples, _decoded(samples)
    images = [as_image(sample, field) for sample in samples]
    high = max((int(image.max()) for image in images if image is not None), default=0)
    return samples, [stretched(image, high) for image in images if image is not None]


def _decoded(files: Sequence[Array]) -> list[Array]:
    try:
        from PIL import Image

        images = []
        for file in files:
            with Image.open(io.BytesIO(file.tobytes())) as image:
                image.draft("RGB", (256, 256))
                small = image.convert("RGB")
                small.thumbnail((256, 256))
                images.append(np.asarray(small))
        return images
    except Exception:  # the bytes are no image; Pillow raises many types of exceptions
        return []


def _values(data: DataSet, split: Split, name: str) -> Array:
    field = data.index.fields[name]
    if field.variable:
        return _lengths(data, split, name)
    most = SAMPLES if field.shape else 16 * SAMPLES
    most = max(1, min(most, _READ_BYTES // field.nbytes))
    if split.count <= most:  # all samples: blocks are faster than single samples
        blocks = data.blocks(split, {name: field})
        return np.concatenate([np.asarray(block[name]).reshape(-1) for block in blocks])
    numbers = evenly(split.count, most)
    found = data.take(split, {name: field}, numbers)
    return np.concatenate([sample[name].reshape(-1) for _, sample in found])


def _lengths(data: DataSet, split: Split, name: str) -> Array:
    most = max(1, _LENGTHS * len(split.shards) // max(_LENGTHS, split.count))
    parts = []
    for i in evenly(len(split.shards), most):
        shard = split.shards[i]
        with data.open(shard, {name: data.index.fields[name]}) as opened:
            parts.append(opened.lengths(name, 0, min(shard.count, _LENGTHS)))
    return np.concatenate(parts)
