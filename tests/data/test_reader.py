import itertools
import json
import pickle
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Index, Shard
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.shard import digest_file
from hpctrain.data.sources import datasets
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import DataError
from tests import forkserver
from tests.shards.planted import KINDS, planted
from tests.written import write_shards

COUNT = 50
IMAGES = np.random.default_rng(0).integers(0, 255, (COUNT, 3, 2), dtype=np.uint8)
SCORES = np.arange(COUNT, dtype=np.float64)
TEXTS = [np.arange(i % 5, dtype=np.uint32) + i for i in range(COUNT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("set"))


@pytest.fixture
def own(tmp_path):
    """Write a data set that the test may damage, and return its folder."""
    return write(tmp_path)


def write(folder):
    samples = {"image": IMAGES, "score": SCORES, "text": TEXTS}
    other = {name: value[:3] for name, value in samples.items()}
    write_shards(folder, [("val", other), ("train", samples)], max_bytes=300)
    return folder


def rewrite(folder, options):
    """Rewrite the shards of a data set with the same values, update the index, return the folder.

    The values are in chunks with h5py's `options`; if `options` is None, they are big-endian and
    without chunks.
    """
    index = Index.load(folder)
    shards = []
    for shard in index.shards:
        path = folder / shard.path
        with h5py.File(path) as file:
            names = ("image", "score", "token", "text/values", "text/offsets")
            values = {name: file[name][:] for name in names if name in file}
        with h5py.File(path, "w") as file:
            for name, array in values.items():
                if options is not None and array.size:
                    chunks = (min(4, len(array)), *array.shape[1:])
                    file.create_dataset(name, data=array, chunks=chunks, **options)
                else:
                    file.create_dataset(name, data=array.astype(array.dtype.newbyteorder(">")))
        size, digest = path.stat().st_size, digest_file(path)
        shards.append(Shard(shard.path, shard.split, shard.count, size, digest))
    Index(index.fields, tuple(shards)).save(folder)
    return folder


def compare(reader, indices):
    rows = reader.read(np.array(indices, dtype=np.int64))
    assert (rows["image"] == IMAGES[indices]).all()
    assert (rows["score"] == SCORES[indices]).all()
    assert isinstance(rows["text"], Ragged)
    assert len(rows["text"]) == len(indices)
    for row, i in enumerate(indices):
        assert rows["text"][row].tolist() == TEXTS[i].tolist()
    assert rows["image"].dtype == np.uint8
    assert rows["image"].shape == (len(indices), 3, 2)
    assert rows["score"].dtype == np.float64
    assert rows["text"].values.dtype == np.uint32


@settings(max_examples=60, deadline=None)
@given(indices=st.lists(st.integers(0, COUNT - 1), max_size=80))
def test_rows_come_in_the_order_asked(folder, indices):
    reader = Reader(folder, "train")
    assert len(reader) == COUNT
    assert len(reader.index.split("train").shards) > 3
    compare(reader, indices)


LAYOUTS = {
    "big-endian": None,
    "chunked": {},
    "compressed": {"compression": "gzip", "shuffle": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(own, layout):
    reader = Reader(rewrite(own, LAYOUTS[layout]), "train")
    compare(reader, [49, 0, 7, 7, 23])
    compare(reader, list(range(COUNT)))


def test_what_is_read_belongs_to_the_caller(folder):
    reader = Reader(folder, "train")
    for indices in ([3], [3, 4], list(range(COUNT))):
        rows = reader.read(np.array(indices))
        rows["image"][:] = 0
        rows["text"].values[:] = 0
        compare(reader, indices)


def test_samples_of_no_length(tmp_path):
    points = [np.zeros((0, 3), np.float32)] * 4
    write_shards(tmp_path, [("train", {"points": points, "x": np.arange(4)})])
    rows = Reader(tmp_path, "train").read(np.array([3, 1]))
    assert rows["points"].lengths.tolist() == [0, 0]
    assert rows["points"].pad().shape == (2, 0, 3)
    assert rows["x"].tolist() == [3, 1]
    assert Reader(tmp_path, "train").read(np.array([], int))["points"].pad().shape == (0, 0, 3)


def test_fields_are_chosen(folder):
    reader = Reader(folder, "val", fields=["score"])
    assert list(reader.fields) == ["score"]
    assert list(reader.read(np.array([2]))) == ["score"]
    assert len(reader) == 3


def test_an_unknown_field_names_those_that_exist(folder):
    with pytest.raises(DataError) as error:
        Reader(folder, "train", fields=["score", "labels"])
    words = "has no field 'labels'; it has image uint8[3, 2], score float64, text uint32[*]"
    assert words in str(error.value)


@pytest.mark.parametrize("index", [-1, COUNT])
def test_an_index_outside(folder, index):
    with pytest.raises(IndexError, match=f"of {COUNT} samples"):
        Reader(folder, "train").read(np.array([index]))


def damage(folder, change):
    """Apply `change` to the first shard of train, and return its path.

    The index gets the new size of the shard and keeps its number of samples.
    """
    index = Index.load(folder)
    shards = list(index.shards)
    i = [shard.path for shard in shards].index("train-00000.h5")
    path = folder / shards[i].path
    change(path)
    shards[i] = Shard(path.name, "train", shards[i].count, path.stat().st_size, "xxh3_128:0")
    Index(index.fields, tuple(shards)).save(folder)
    return path


def replaced(name, array):
    def change(path):
        with h5py.File(path, "r+") as file:
            del file[name]
            if array is not None:
                file[name] = array

    return change


def edited(name, row, value):
    def change(path):
        with h5py.File(path, "r+") as file:
            file[name][row] = value

    return change


def attribute(name, value):
    def change(path):
        with h5py.File(path, "r+") as file:
            file.attrs[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(bytes(5000)), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:600]), "is damaged"),
        (replaced("score", None), "has no dataset 'score'; the index lists it"),
        (replaced("score", np.zeros(3)), "'score' is float64 [3], the index says float64 ["),
        (replaced("image", IMAGES[:7].astype("i2")), "'image' is int16 [7, 3, 2], the index says"),
        (replaced("text/offsets", None), "has no dataset 'text/offsets'"),
        (replaced("text", None), "has no dataset 'text/offsets'"),
        (edited("text/offsets", -1, 99), "its offsets go from 0 to 99"),
        (edited("text/offsets", 2, 10**6), "the offsets of 'text' go back"),
        (edited("text/offsets", 2, -8), "the offsets of 'text' go back"),
        (replaced("score", h5py.Empty("f8")), "'score' is float64 [], the index says float64 ["),
        (replaced("score", h5py.ExternalLink("val-00000.h5", "/score")), "is a link into"),
        (attribute("version", 2), "found version 2, this hpctrain reads 1"),
    ],
)
def test_a_damaged_shard_is_named(own, change, words):
    path = damage(own, change)
    with pytest.raises(DataError) as error:
        Reader(own, "train").read(np.arange(7))
    assert str(path) in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_shard_cannot_show_another_file(tmp_path, kind, mapped):
    secret = tmp_path / "secret.txt"
    secret.write_bytes(b"the private key of whoever trains")
    folder = planted(tmp_path / "set", secret, kind)
    with pytest.raises(DataError, match=r"set/train-00000\.h5: 'x' is .*(secret.txt|other.h5)"):
        Reader(folder, "train", mapped=mapped).read(np.arange(4))


def test_links_inside_a_shard_are_followed(own):
    def linked(path):
        with h5py.File(path, "r+") as file:
            file.move("score", "other/values")
            file["other/again"] = h5py.SoftLink("values")
            file["score"] = h5py.SoftLink("/other/again")

    damage(own, linked)
    assert Reader(own, "train").read(np.array([1]))["score"] == SCORES[1]

    def circle(path):
        with h5py.File(path, "r+") as file:
            del file["score"]
            file["score"] = h5py.SoftLink("/score")

    damage(own, circle)
    with pytest.raises(DataError, match="has no dataset 'score'"):
        Reader(own, "train").read(np.array([1]))


FORK = """
import torch
import os, sys
import numpy as np
from pathlib import Path
from hpctrain.data.sources.reader import Reader

reader = Reader(Path(sys.argv[1]), "train")
indices = np.arange(50)[::-1]
before = reader.read(indices)
reader.opened._changed.acquire()            # another thread seems to hold the lock when we fork
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        for _ in range(10):
            rows = reader.read(indices)
            assert all((rows[name] == before[name]).all() for name in ("image", "score"))
        os._exit(0)
    children.append(child)
reader.opened._changed.release()
for _ in range(10):
    assert (reader.read(indices)["score"] == before["score"]).all()
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
"""


def run_program(folder, program, own, *more):
    """Run a program in a process of its own, and check that it exits with 0."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "program", str(own), *map(str, more)]
    forkserver.run(command, cwd=folder, check=True, timeout=60)


def test_handles_do_not_cross_a_fork(own, tmp_path):
    rewrite(own, {"compression": "gzip"})
    run_program(tmp_path, FORK, own)


def test_a_reader_is_pickled_without_its_handles(folder):
    reader = Reader(folder, "train")
    compare(reader, [1, 2])
    compare(pickle.loads(pickle.dumps(reader)), [1, 2])


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Write a data set of 300 shards with a sample in each, and return its folder."""
    folder = tmp_path_factory.mktemp("many")
    write_shards(folder, [("train", {"x": np.arange(300), "y": np.arange(300.0)})], max_bytes=8)
    return folder


@pytest.mark.parametrize("chunks", [False, True])
def test_shards_that_are_not_mapped(own, chunks):
    if chunks:
        rewrite(own, {})
    reader = Reader(own, "train", mapped=False)
    compare(reader, [49, 0, 7, 7, 8, 9, 23, 8])
    compare(reader, list(range(COUNT)))
    compare(reader, [])


def test_more_shards_than_can_be_open(many, monkeypatch):
    """Several threads at a time map shards into slots that other shards have left."""
    monkeypatch.setattr(datasets, "MAX_SLOTS", 24)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (96, 96))
    reader = Reader(many, "train")
    assert len(reader.shards) == 300
    indices = [np.random.default_rng(i).integers(0, 300, 50) for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        for rows, wanted in zip(pool.map(reader.read, indices), indices, strict=True):
            assert (rows["x"] == wanted).all()
            assert (rows["y"] == wanted).all()
    assert len(reader.opened._datasets.layouts) <= 24


def adopted(folder, fields, write, userblock=0):
    """Write two HDF5 files as another program might, and an index of version 2; return `folder`.

    `write(file, start, stop)` writes the samples from `start` to `stop` into one file.
    """
    shards, ends = [], [0, 20, COUNT]
    for start, stop in itertools.pairwise(ends):
        path = folder / f"{start}.h5"
        with h5py.File(path, "w", userblock_size=userblock) as file:
            write(file, start, stop)
        size = path.stat().st_size
        shards.append(Shard(path.name, "train", stop - start, size, digest_file(path)))
    index = Index(fields, tuple(shards))
    index.save(folder)
    assert Index.load(folder) == index
    assert Index.load(folder).digest == index.digest
    return folder


# Each is (axis, h5py's options, dtype in the file).
ELSEWHERE = {
    "contiguous": (0, {}, "<i4"),
    "big-endian": (0, {}, ">i4"),
    "chunks": (0, {"chunks": (3, 4, 2)}, "<i4"),
    "tiles": (0, {"chunks": (3, 2, 2), "compression": "gzip"}, "<i4"),
    "axis 1": (1, {}, "<i4"),
    "axis 1, big-endian": (1, {}, ">i4"),
    "axis 1, chunks": (1, {"chunks": (4, 7, 3)}, "<i4"),
    "axis 1, tiles": (1, {"chunks": (3, 7, 2), "compression": "gzip", "shuffle": True}, ">i4"),
    "axis 1, filters of HDF5": (1, {"chunks": (3, 7, 2), "scaleoffset": 0}, "<i4"),
    "axis 2": (2, {"chunks": (3, 2, 8), "compression": "lzf"}, "<i4"),
    "axis 2, chunks of one": (2, {"chunks": (1, 1, 1)}, "<i4"),
}
CUBES = np.random.default_rng(1).integers(-99, 99, (COUNT, 4, 3), dtype=np.int32)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("layout", ELSEWHERE)
@pytest.mark.parametrize("userblock", [0, 512])  # MATLAB's files have a userblock
def test_fields_that_lie_elsewhere(tmp_path, layout, mapped, userblock):
    axis, options, dtype = ELSEWHERE[layout]

    def write(file, start, stop):
        cubes = np.moveaxis(CUBES[start:stop], 0, axis).astype(dtype)
        file.create_dataset("deep/down/cubes", data=cubes, **options)
        file["flag"] = np.arange(start, stop) % 3 == 0  # HDF5's bool is an enumeration

    fields = {
        "cube": Field("int32", (4, 3), dataset="/deep/down/cubes", axis=axis),
        "flag": Field("uint8"),
    }
    reader = Reader(adopted(tmp_path, fields, write, userblock), "train", mapped=mapped)
    for indices in ([49, 0, 7, 7, 23, 22], list(range(COUNT)), [3], []):
        rows = reader.read(np.array(indices, np.int64))
        assert rows["cube"].dtype == np.int32
        assert (rows["cube"] == CUBES[indices]).all()
        assert rows["flag"].tolist() == [int(i % 3 == 0) for i in indices]


@pytest.mark.parametrize("kind", ["int64", "int32", ">u2", "uint64"])
def test_a_variable_length_field_that_lies_elsewhere(tmp_path, kind):
    def write(file, start, stop):
        texts = TEXTS[start:stop]
        file["all/tokens"] = np.concatenate(texts)
        file["ends"] = np.cumsum([0, *map(len, texts)]).astype(kind)

    fields = {"text": Field("uint32", variable=True, dataset="all/tokens", offsets="ends")}
    reader = Reader(adopted(tmp_path, fields, write), "train")
    indices = [49, 0, 7, 7, 23]
    rows = reader.read(np.array(indices))["text"]
    assert [row.tolist() for row in rows] == [TEXTS[i].tolist() for i in indices]
    assert reader.lengths("text", np.arange(COUNT)).tolist() == [len(text) for text in TEXTS]
    assert reader.offsets("text", 0)[-1] == reader.elements("text")[0]


def test_the_index_says_where_a_field_lies(tmp_path):
    index = Index({"x": Field("int64", (3,))}, (Shard("a.h5", "train", 1, 1, "xxh3_128:0"),))
    other = replace(index, fields={"x": Field("int64", (3,), dataset="/y", axis=1)})
    assert index.fields == other.fields  # the samples have the same form
    assert index.digest != other.digest
    other.save(tmp_path)
    content = json.loads((tmp_path / "index.json").read_text())
    assert content["fields"]["x"] == {
        "dtype": "int64",
        "shape": [3],
        "variable": False,
        "dataset": "/y",
        "axis": 1,
    }
    content["fields"]["x"]["axis"] = 2
    (tmp_path / "index.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"axis 2 cannot count samples \[3\]"):
        Index.load(tmp_path)
