"""Measures how long other writers take for the same data, each in its own process.

python -m tests.benchmarks.prep.writers NAME SRC OUT        (from the root of the checkout)

The last line of the output is the time in seconds.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SHARD = 64 * 2**20  # bytes
WORKERS = 2


def images(src: Path) -> list[tuple[Path, int]]:
    """Return the files of a folder by class, and their labels."""
    classes = sorted(path for path in src.iterdir())
    return [(path, i) for i, folder in enumerate(classes) for path in sorted(folder.iterdir())]


def decoded(path: Path) -> NDArray[np.uint8]:
    """Return an image as uint8 (3, H, W), the form that all writers store."""
    with Image.open(path) as image:
        return np.ascontiguousarray(np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def only_decode(src: Path, out: Path) -> float:
    """Only decode the images, in one process, and write nothing."""
    start = time.perf_counter()
    for path, _ in images(src):
        decoded(path)
    return time.perf_counter() - start


def webdataset(src: Path, out: Path) -> float:
    """Write tar files in one process; webdataset supports no more."""
    import webdataset

    start = time.perf_counter()
    with webdataset.ShardWriter(f"{out}/%05d.tar", maxsize=SHARD, verbose=0) as sink:
        for row, (path, label) in enumerate(images(src)):
            sample = {"image.npy": decoded(path), "label.cls": label}
            sink.write({"__key__": f"{row:09d}", **sample})
    return time.perf_counter() - start


def streaming(src: Path, out: Path) -> float:
    """Write MDS files in one process, as its documentation shows."""
    from tests.benchmarks.loaders.peers import _import_streaming

    writer = _import_streaming().MDSWriter
    start = time.perf_counter()
    columns = {"image": "ndarray:uint8", "label": "int64"}
    with writer(out=str(out), columns=columns, size_limit=SHARD) as sink:
        for path, label in images(src):
            sink.write({"image": decoded(path), "label": label})
    return time.perf_counter() - start


def litdata(src: Path, out: Path) -> float:
    """Run `optimize` of litdata with the same number of workers as data_prep."""
    import litdata

    start = time.perf_counter()
    litdata.optimize(
        fn=_litdata_sample,
        inputs=[(str(path), label) for path, label in images(src)],
        output_dir=str(out),
        num_workers=WORKERS,
        chunk_bytes=SHARD,
        verbose=False,
    )
    return time.perf_counter() - start


def _litdata_sample(item: tuple[str, int]) -> dict[str, Any]:
    return {"image": decoded(Path(item[0])), "label": item[1]}


def datasets_map(src: Path, out: Path) -> float:
    """Run `map` of datasets with the tokenizer of OUT/../tokenizer.json, then `save_to_disk`."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    path = str(out.parent / "tokenizer.json")
    start = time.perf_counter()
    tokenizer = Tokenizer.from_file(path)
    data = datasets.load_dataset(
        "json", data_files=str(src), split="train", cache_dir=str(out / "cache")
    )
    tokens = data.map(
        lambda batch: {"tokens": [e.ids for e in tokenizer.encode_batch(batch["text"])]},
        batched=True,
        remove_columns=data.column_names,
        num_proc=WORKERS,
    )
    tokens.save_to_disk(str(out / "saved"))
    return time.perf_counter() - start


def copy(src: Path, out: Path) -> float:
    """Run `cp`, and wait until the copy is on the disk."""
    import os
    import shutil

    start = time.perf_counter()
    shutil.copyfile(src, out / src.name)
    with open(out / src.name, "rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - start


WRITERS: dict[str, tuple[str, Callable[[Path, Path], float]]] = {
    "decode alone": ("", only_decode),
    "webdataset": ("webdataset", webdataset),
    "mosaicml-streaming": ("mosaicml-streaming", streaming),
    "litdata": ("litdata", litdata),
    "datasets.map": ("datasets", datasets_map),
    "cp": ("", copy),
}


if __name__ == "__main__":
    took = WRITERS[sys.argv[1]][1](Path(sys.argv[2]), Path(sys.argv[3]))
    print(f"\n{took}")
