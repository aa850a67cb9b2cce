"""Small files of every format that `data_prep` reads, and what other libraries read from them.

`CASES` has the cases by their names. Files are made once, and are the same in each run.
"""

import csv
import gzip
import io
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Samples = Sequence[Any]  # of one field: arrays, or bytes
X = (np.arange(240, dtype="<i4") * 7919 % 10007).reshape(60, 4)
Y = (np.arange(60) / 7).astype("<f4")
TEXTS = [f"täxt {i} " * (i % 5) + "end" for i in range(40)]


@dataclass(frozen=True)
class Case:
    """A format.

    Attributes:
        make: Writes the files into the current folder.
        target: The file that is damaged.
        args: The command line, without OUT.
        read: Returns what another library reads from the files, by field, or raises an error. None:
            the format has checksums, so that the samples are the original ones or refused.
    """

    make: Callable[[], None]
    target: str
    args: tuple[str, ...]
    read: Callable[[], Mapping[str, Samples]] | None = None


@cache
def files(name: str) -> dict[str, bytes]:
    """Return the files of a case, by their paths."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            CASES[name].make()
        finally:
            os.chdir(before)
        found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# NumPy


def npz(method: int) -> Callable[[], None]:
    def make() -> None:
        with zipfile.ZipFile("x.npz", "w", method) as archive:
            for name, array in (("x", X), ("y", Y)):
                content = io.BytesIO()
                np.save(content, array)
                info = zipfile.ZipInfo(f"{name}.npy")  # without the time of today
                info.compress_type = method
                archive.writestr(info, content.getvalue())

    return make


# HDF5


def hdf5(**options: Any) -> Callable[[], None]:
    def make() -> None:
        with h5py.File("x.h5", "w") as file:
            file.create_dataset("x", data=X, **options)

    return make


def read_hdf5() -> dict[str, Samples]:
    with h5py.File("x.h5") as file:
        return {"x": file["x"][:]}


# Tables


def make_csv() -> None:
    rows = [f"{i},{i / 8},{text}" for i, text in enumerate(TEXTS)]
    Path("x.csv").write_text("\n".join(["i,f,s", *rows, ""]))


def read_csv() -> dict[str, Samples]:
    with open("x.csv", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    return dict(zip(header, map(list, zip(*filter(None, rows), strict=True)), strict=True))


def table() -> Any:
    import pyarrow as pa

    return pa.table({"x": X[:40].tolist(), "y": Y[:40], "s": TEXTS})


def make_parquet() -> None:
    from pyarrow import parquet

    parquet.write_table(table(), "x.parquet", row_group_size=16, write_page_checksum=True)


def read_parquet() -> dict[str, Samples]:
    from pyarrow import parquet

    return of_table(parquet.read_table("x.parquet", page_checksum_verification=True))


def of_table(found: Any) -> dict[str, Samples]:
    def plain(value: Any) -> Any:  # a flipped bit can make text into bytes
        value = value.encode() if isinstance(value, str) else value
        return value if isinstance(value, bytes) else np.array(value)

    return {name: [*map(plain, found[name].to_pylist())] for name in found.column_names}


# Samples


def make_tar() -> None:
    with tarfile.open("x.tar", "w") as tar:
        for i in range(12):
            array = io.BytesIO()
            np.save(array, X[i])
            members = (("npy", array.getvalue()), ("cls", str(i).encode()))
            for extension, content in (*members, ("txt", TEXTS[i].encode())):
                info = tarfile.TarInfo(f"{i:03d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def read_tar() -> dict[str, Samples]:
    samples: dict[str, dict[str, Any]] = {}
    with tarfile.open("x.tar") as tar:
        for member in tar:
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            key, point, kind = member.name.partition(".")
            if kind == "npy":
                samples.setdefault(key, {})["array"] = np.load(io.BytesIO(content))
            elif kind == "cls":
                samples.setdefault(key, {})["label"] = np.array(int(content))
            elif point:  # a member without a kind belongs to no sample
                samples.setdefault(key, {})["text"] = content
    first, *_ = samples.values()
    return {name: [sample[name] for sample in samples.values()] for name in first}


def image(suffix: str, **options: Any) -> Callable[[], None]:
    def make() -> None:
        from PIL import Image

        Path("in/a").mkdir(parents=True)
        rows, columns = np.mgrid[:24, :32]
        pixels = np.stack([rows * 8, columns * 7, (rows ^ columns) * 5], -1).astype(np.uint8)
        for name in "01":
            Image.fromarray(pixels).save(f"in/a/{name}.{suffix}", **options)

    return make


def read_images(suffix: str) -> Callable[[], dict[str, Samples]]:
    def read() -> dict[str, Samples]:
        from PIL import Image

        found = []
        for name in "01":
            with Image.open(f"in/a/{name}.{suffix}") as image:
                found.append(np.moveaxis(np.asarray(image.convert("RGB")), 2, 0))
        return {"image": found, "label": [np.array(0)] * 2}

    return read


# Text


def text(name: str, content: bytes) -> Callable[[], None]:
    def make() -> None:
        Path(name).write_bytes(content)

    return make


def tokens(documents: Sequence[bytes]) -> dict[str, Samples]:
    """Return the tokens that `--tokenizer bytes` makes of documents."""
    return {"tokens": [np.array([*d, 256], np.uint16) for d in documents if d]}


def read_zstd() -> dict[str, Samples]:
    import pyarrow as pa

    with pa.CompressedInputStream(pa.OSFile("x.txt.zst"), "zstd") as file:
        return tokens([file.read()])


def make_zstd() -> None:
    import zstandard

    Path("x.txt.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(LONG))


def read_jsonl() -> dict[str, Samples]:
    lines = Path("x.jsonl").read_bytes().split(b"\n")
    return tokens([json.loads(line)["text"].encode() for line in lines if line.strip()])


LONG = "\n".join(TEXTS).encode()
JSONL = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS).encode()
ARRAY = ("arrays", "--field")
CASES = {
    "npy": Case(
        lambda: np.save("x.npy", X), "x.npy", ("arrays", "x.npy"), lambda: {"x": np.load("x.npy")}
    ),
    "npz": Case(npz(zipfile.ZIP_STORED), "x.npz", ("arrays", "x.npz")),
    "npz deflate": Case(npz(zipfile.ZIP_DEFLATED), "x.npz", ("arrays", "x.npz")),
    "hdf5": Case(hdf5(), "x.h5", (*ARRAY, "x=x.h5:x"), read_hdf5),
    "hdf5 chunks": Case(
        hdf5(chunks=(1, 2), compression="gzip"), "x.h5", (*ARRAY, "x=x.h5:x"), read_hdf5
    ),
    "index": Case(
        hdf5(chunks=(1, 2), compression="gzip", shuffle=True),
        "x.h5",
        ("index", "x.h5", "--field", "x=x"),
        read_hdf5,
    ),
    "csv": Case(make_csv, "x.csv", ("table", "x.csv"), read_csv),
    "parquet": Case(make_parquet, "x.parquet", ("table", "x.parquet"), read_parquet),
    "webdataset": Case(make_tar, "x.tar", ("webdataset", "x.tar"), read_tar),
    "png": Case(image("png"), "in/a/1.png", ("images", "in")),
    "jpeg": Case(image("jpg"), "in/a/1.jpg", ("images", "in"), read_images("jpg")),
    "webp": Case(
        image("webp", lossless=True), "in/a/1.webp", ("images", "in"), read_images("webp")
    ),
    "txt gz": Case(
        text("x.txt.gz", gzip.compress(LONG, mtime=0)), "x.txt.gz", ("text", "x.txt.gz")
    ),
    "txt zst": Case(make_zstd, "x.txt.zst", ("text", "x.txt.zst"), read_zstd),
    "jsonl": Case(text("x.jsonl", JSONL), "x.jsonl", ("text", "x.jsonl"), read_jsonl),
}
