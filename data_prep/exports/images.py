"""Export to image files, in a folder for each class.

Threads write the files, because Pillow releases the GIL while it encodes.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data_prep.datasets.dataset import DataSet, sizes
from data_prep.datasets.shards import Rows
from data_prep.libraries import library
from data_prep.show.images import SIGNATURES, as_image, is_text
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import Field
from hpctrain.shards.index import Split
from hpctrain.shards.types import Array

SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WebP": ".webp", "BMP": ".bmp"}
_CLASSES = "classes.txt"
_WHAT = "uint8 (C, H, W) with 1, 3 or 4 channels, (H, W), or encoded files"


class Images:
    """Writes SPLIT/CLASS/0000012.png, and classes.txt.

    Args:
        data: The data set.
        image: The field with the images; if empty, the only field that has images.
        label: The field with the labels; None takes the first one with categories, or the only
            one with whole numbers.
    """

    def __init__(self, data: DataSet, image: Sequence[str] = (), label: str | None = None) -> None:
        self.data, self._image = data, _image_field(data, image)
        self._label = _label_field(data, label)
        names = [self._image, *([self._label] if self._label else [])]
        self.fields: Mapping[str, Field] = data.fields(names)
        self._encoded = is_text(self.fields[self._image])
        if not self._encoded:
            library("PIL.Image", "--to images", name="Pillow", error=ConfigError)
        self._names: dict[int, str] = {}
        if self._label:
            categories = data.categories(self._label)
            values = set(range(len(categories)))
            for split in data.splits():
                for rows in data.blocks(split, data.fields([self._label])):
                    values |= set(np.unique(np.asarray(rows[self._label])).tolist())
            self._names = folder_names(sorted(values), categories)

    def write(
        self, folder: Path, split: Split, count: int, advance: Callable[[int, int], None]
    ) -> None:
        """Write the first `count` samples of a split."""
        if self._names:
            lines = "".join(f"{name}\n" for name in self._names.values())
            (folder / _CLASSES).write_text(lines, encoding="utf-8")
        digits, first = max(7, len(str(count))), 0
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for rows in self.data.blocks(split, self.fields, count):
                places = []
                for i in range(len(rows[self._image])):
                    target = folder / split.name / self._class(rows, i)
                    target.mkdir(parents=True, exist_ok=True)
                    places.append(target / f"{first + i:0{digits}d}")
                list(pool.map(self._save, places, iter(rows[self._image])))
                first += len(places)
                advance(len(places), sizes(rows, self.fields))

    def _class(self, rows: Rows, i: int) -> str:
        return self._names[int(rows[self._label][i])] if self._label else ""

    def _save(self, place: Path, value: Array) -> None:
        if self._encoded:
            content = value.tobytes()
            kinds = [kind for start, kind in SIGNATURES.items() if content.startswith(start)]
            if not kinds:
                raise DataError(
                    f"field {self._image!r}: sample {int(place.name)} is no image file; known are "
                    f"{', '.join(SUFFIXES)}"
                )
            place.with_suffix(SUFFIXES[kinds[0]]).write_bytes(content)
            return
        image = as_image(value, self.fields[self._image])
        assert image is not None  # see _image_field
        picture = image[:, :, 0] if image.shape[2] == 1 else np.ascontiguousarray(image)
        from PIL import Image

        Image.fromarray(picture).save(place.with_suffix(".png"), compress_level=1)


def folder_names(values: Sequence[int], categories: Sequence[str]) -> dict[int, str]:
    """Return a folder name for each label: its category in safe characters, or the number.

    Numbers are padded with zeros. Names are unique also if upper and lower case are the same.

    >>> folder_names([0, 1, 2], ["cat", "../dog", "Cat"])
    {0: 'cat', 1: '___dog', 2: 'Cat-2'}
    """
    width = max((len(str(value)) for value in values), default=1)
    names: dict[int, str] = {}
    taken: set[str] = set()
    for value in values:
        name = f"{value:0{width}d}"
        if 0 <= value < len(categories):
            name = re.sub(r"[^\w .-]", "_", categories[value])[:100].strip()
            name = re.sub(r"^[.-]+", lambda start: "_" * len(start[0]), name).rstrip(".")
            name = name.encode()[:200].decode(errors="ignore")
        if not name or name.casefold() in taken:
            name = f"{name}-{value}".lstrip("-")
        while name.casefold() in taken:
            name += "_"
        taken.add(name.casefold())
        names[value] = name
    return names


def _image_field(data: DataSet, names: Sequence[str]) -> str:
    found = [name for name, field in data.fields(names).items() if _is_image(data, name, field)]
    if not found:
        raise ConfigError(f"--to images: no field holds images: {_WHAT}")
    if len(found) > 1:
        raise ConfigError(f"--to images: --field NAME says which of {', '.join(found)}")
    return found[0]


def _is_image(data: DataSet, name: str, field: Field) -> bool:
    if is_text(field):
        ((_, sample),) = data.take(data.splits()[0], {name: field}, [0])
        return sample[name].tobytes().startswith(tuple(SIGNATURES))
    return as_image(np.empty(field.shape, np.uint8), field) is not None


def _label_field(data: DataSet, name: str | None) -> str:
    found = [
        name
        for name, field in data.index.fields.items()
        if not field.shape and not field.variable and not field.dtype.startswith("float")
    ]
    if name is not None and name not in found:
        there = ", ".join(found) or "none"
        raise ConfigError(
            f"--label {name!r}: it is a field with one whole number per sample; there are {there}"
        )
    named = [name for name in found if data.categories(name)]
    return name or next(iter([*named, *(found if len(found) == 1 else [])]), "")
