"""What is drawn of a data set: some samples of each field, and numbers for its distribution.

The samples are evenly spaced over the split, the same each time, and only they are read.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.datasets.dataset import DataSet, evenly
from data_prep.show.console import printable
from data_prep.show.images import SIGNATURES, as_image, is_text, stretched
from data_prep.show.summary import Summary, class_name
from hpctrain.data.field import Field
from hpctrain.data.index import Split
from hpctrain.data.types import Array

SAMPLES = 512  # of a split, for the distribution of values
READ_BYTES = 64 * 2**20  # of them, about
LENGTHS = 2**21  # samples whose lengths are counted, about
SHOWN = 24  # samples that are drawn


@dataclass
class View:
    """What is drawn of a field.

    Attributes:
        name: The field's.
        field: Its schema.
        categories: The names of its values, or none.
        summaries: By split.
        label: The field that the captions are from; "": they are the samples' numbers.
        captions: Of the samples.
        samples: Some of the first split; none of a variable-length field.
        pictures: These as uint8 (H, W, 1, 3 or 4), if they are images.
        values: Of more samples, flat, by split; or a variable-length field's lengths.
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
    """Yield what is drawn of each field of the summaries.

    Raises:
        DataError: A shard is damaged.
    """
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
    """The field that says what a sample is: one whose values have names, or with few of them."""
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
    """Samples, and what they are as images."""
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
    except Exception:  # whatever Pillow makes of bytes that are no image: then none are drawn
        return []


def _values(data: DataSet, split: Split, name: str) -> Array:
    field = data.index.fields[name]
    if field.variable:
        return _lengths(data, split, name)
    most = SAMPLES if field.shape else 16 * SAMPLES
    most = max(1, min(most, READ_BYTES // field.nbytes))
    if split.count <= most:  # all of them: in blocks, not one by one
        blocks = data.blocks(split, {name: field})
        return np.concatenate([np.asarray(block[name]).reshape(-1) for block in blocks])
    numbers = evenly(split.count, most)
    found = data.take(split, {name: field}, numbers)
    return np.concatenate([sample[name].reshape(-1) for _, sample in found])


def _lengths(data: DataSet, split: Split, name: str) -> Array:
    most = max(1, LENGTHS * len(split.shards) // max(LENGTHS, split.count))
    parts = []
    for i in evenly(len(split.shards), most):
        shard = split.shards[i]
        with data.open(shard, {name: data.index.fields[name]}) as opened:
            parts.append(opened.lengths(name, 0, min(shard.count, LENGTHS)))
    return np.concatenate(parts)
