"""Real data that comes with Python packages: for examples, tests and first runs."""

import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.convert import Array, Batch, Source
from data_prep.split import Split
from hpctrain.data.index import Field
from hpctrain.errors import DataError

# Tests and examples repeat themselves; installed packages are not the standard library.
SKIPPED = {
    *("test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages"),
    *("__pycache__", "lib2to3"),
}
DOCUMENTS = 256  # in a batch


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits: `image` uint8 (1, 8, 8) of 0 to 16, `label` int64.

    Splits: train 80 %, val 20 %, by a hash of the image, so that equal ones stay together.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'hpctrain[sample]'"
        ) from None
    images, labels = load_digits(return_X_y=True)
    image = images.astype(np.uint8).reshape(-1, 1, 8, 8)
    label = labels.astype(np.int64)
    split = Split({"train": 0.8, "val": 0.2})
    place = np.array([split.of(sample.tobytes()) for sample in image])

    def batches() -> Iterator[tuple[str, Batch]]:
        for name in split.fractions:
            rows = place == name
            yield name, {"image": image[rows], "label": label[rows]}

    fields = {"image": Field("uint8", (1, 8, 8)), "label": Field("int64")}
    about = {"from": "sklearn.datasets.load_digits", "split": split.fractions}
    return Source("digits", fields, batches, len(image), about)


def stdlib(folder: Path | None = None) -> Source:
    """The standard library's source: `text` and `path`, variable-length uint8 (UTF-8).

    One document for each .py file under `folder` (default: Python's own), sorted by path. Empty
    files, and those that are not UTF-8, are left out and counted. Splits: train 90 %, val 10 %,
    by a hash of the path.

    Raises:
        DataError: There is no such file.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    paths = [path for path in paths if not SKIPPED & set(path.split("/"))]
    if not paths:
        raise DataError(f"there are no .py files under {folder}: this Python has no source")
    split = Split({"train": 0.9, "val": 0.1})
    about = {"from": "the Python standard library", "split": split.fractions}
    fields = {"text": Field("uint8", variable=True), "path": Field("uint8", variable=True)}

    def batches() -> Iterator[tuple[str, Batch]]:
        skipped = {"empty": 0, "not UTF-8": 0}
        waiting: dict[str, list[tuple[Array, Array]]] = defaultdict(list)
        for path in paths:
            text = (folder / path).read_bytes()
            if not text or not _is_utf8(text):
                skipped["not UTF-8" if text else "empty"] += 1
                continue
            name = split.of(path.encode())
            waiting[name].append((_bytes(text), _bytes(path.encode())))
            if len(waiting[name]) == DOCUMENTS:
                yield name, _batch(waiting.pop(name))
        for name in [name for name in split.fractions if waiting[name]]:
            yield name, _batch(waiting[name])
        about["skipped"] = skipped

    return Source("stdlib", fields, batches, len(paths), about)


def _batch(documents: list[tuple[Array, Array]]) -> Batch:
    texts, paths = zip(*documents, strict=True)
    return {"text": list(texts), "path": list(paths)}


def _bytes(text: bytes) -> Array:
    return np.frombuffer(text, np.uint8)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
