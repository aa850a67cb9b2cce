import json
import os
import shutil
import sys
import time

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.writing import commit
from data_prep.writing.compression import Compression
from hpctrain.data.shards.field import DTYPES, Field
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.shard import digest_file
from hpctrain.errors import DataError, StorageError
from tests import forkserver
from tests.written import write_shards

rng = np.random.default_rng(0)


def image_set(count=10):
    return {
        "image": rng.integers(0, 255, (count, 3, 4, 4), dtype=np.uint8),
        "label": np.arange(count),
        "text": [np.full(i % 4, i, np.uint16) for i in range(count)],
    }


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.h5")}


def test_a_shard_is_plain_hdf5(tmp_path):
    samples = image_set()
    index = write_shards(tmp_path, [("train", samples)])
    assert [shard.path for shard in index.shards] == ["train-00000.h5"]
    with h5py.File(tmp_path / "train-00000.h5") as file:
        assert dict(file.attrs) == {
            "format": b"hpctrain-shard",
            "version": 1,
            "split": b"train",
            "count": 10,
        }
        assert sorted(file) == ["image", "label", "text"]
        assert (file["image"][:] == samples["image"]).all()
        assert file["image"].dtype == "|u1"
        assert (file["label"][:] == samples["label"]).all()
        assert sorted(file["text"]) == ["offsets", "values"]
        assert (file["text/values"][:] == np.concatenate(samples["text"])).all()
        assert file["text/offsets"][:].tolist() == [0, 0, 1, 3, 6, 6, 7, 9, 12, 12, 13]
        for name in ("image", "label", "text/values", "text/offsets"):
            dataset = file[name]
            assert dataset.chunks is None
            assert dataset.compression is None
            assert dataset.id.get_offset() % 4096 == 0


def test_the_same_input_gives_the_same_bytes_however_it_is_batched(tmp_path):
    samples = image_set(100)
    write_shards(tmp_path / "a", [("train", samples)], max_bytes=1500)
    time.sleep(1.1)  # HDF5 stores times, if at all, in seconds
    parts = [slice(0, 1), slice(1, 1), slice(1, 64), slice(64, 100)]
    batches = [("train", {name: value[part] for name, value in samples.items()}) for part in parts]
    write_shards(tmp_path / "b", batches, max_bytes=1500)
    assert len(contents(tmp_path / "a")) > 3
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert Index.load(tmp_path / "a").digest == Index.load(tmp_path / "b").digest


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_the_digest_is_that_of_the_file(tmp_path, codec):
    """The digest is computed while the file is written, also for fields without any bytes."""
    samples = image_set(30) | {
        "none": [np.zeros(0)] * 30,
        "wide": np.arange(90, dtype=">i4").reshape(30, 3),
        "page": np.zeros((30, 4096), np.uint8),
    }
    index = write_shards(
        tmp_path, [("train", samples)], compression=Compression(codec), max_bytes=70_000
    )
    assert len(index.shards) == 2
    for shard in index.shards:
        assert shard.digest == digest_file(tmp_path / shard.path)
        assert shard.bytes == (tmp_path / shard.path).stat().st_size


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([*DTYPES]),
    shape=st.lists(st.integers(1, 3), max_size=3),
    count=st.integers(1, 30),
    order=st.sampled_from("<>"),
)
def test_every_dtype_shape_and_byte_order(tmp_path_factory, dtype, shape, count, order):
    folder = tmp_path_factory.mktemp("set")
    values = rng.integers(0, 100, (count, *shape)).astype(np.dtype(dtype).newbyteorder(order))
    index = write_shards(folder, [("train", {"x": values})], max_bytes=100)
    assert index.fields["x"] == Field(dtype, tuple(shape))
    found = []
    for shard in index.shards:
        with h5py.File(folder / shard.path) as file:
            assert file["x"].dtype == np.dtype(dtype).newbyteorder("<")
            found.append(file["x"][:])
    assert (np.concatenate(found) == values).all()


@pytest.mark.parametrize("largest", [1e200, 1.7e308])
def test_statistics_beyond_float64_are_none(tmp_path, largest):
    x = np.array([-largest, largest, largest, 0.0])
    values = write_shards(tmp_path, [("train", {"x": x})]).statistics["train"]["x"]
    assert (values.std, values.min, values.max) == (None, -largest, largest)
    assert Index.load(tmp_path).statistics["train"]["x"] == values


BAD = [
    ({"x": np.zeros(2, complex)}, "field 'x': dtype complex128 is not supported; allowed: uint8"),
    ({"x": np.zeros(2, bool)}, "dtype bool is not supported"),
    ({"x": np.array(["a"])}, "is not supported"),
    ({"x": np.array([{}])}, "dtype object is not supported"),
    ({"x": np.zeros((2, 0))}, "field 'x': shape [0] has no elements"),
    ({"a/b": np.zeros(2)}, "field 'a/b': a name has"),
    ({"mask": np.zeros(2)}, "cannot be named 'mask'"),
    ({"x": np.zeros(2), "y": np.zeros(3)}, "different numbers of samples: {'x': 2, 'y': 3}"),
    ({}, "at least one field"),
]


@pytest.mark.parametrize(("batch", "words"), BAD)
def test_what_cannot_be_stored(tmp_path, batch, words):
    with pytest.raises(DataError) as error:
        write_shards(tmp_path, [("train", batch)])
    assert words in str(error.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"x": np.zeros((2, 3)), "t": [np.zeros(1)] * 2},
            "field 'x': found samples of float64 [3]",
        ),
        ({"x": np.zeros(2, "f4"), "t": [np.zeros(1)] * 2}, "the data set has float64"),
        ({"x": np.zeros(2)}, "a batch has the fields x; the data set has t, x"),
        ({"x": [np.zeros(1)] * 2, "t": [np.zeros(1)] * 2}, "field 'x'"),
        ({"x": np.zeros(2), "t": [np.zeros(1), np.zeros(1, "i4")]}, "found a sample int32 [1]"),
        ({"x": np.zeros(2), "t": [np.zeros((1, 2))] * 2}, "found a sample float64 [1, 2]"),
    ],
)
def test_later_batches_have_the_schema_of_the_first(tmp_path, batch, words):
    first = {"x": np.zeros(2), "t": [np.zeros(1), np.zeros(2)]}
    with pytest.raises(DataError) as error:
        write_shards(tmp_path, [("train", first), ("train", batch)])
    assert words in str(error.value)


def test_an_exception_leaves_nothing_behind(tmp_path):
    def batches():
        yield "train", {"x": np.zeros(100)}
        raise RuntimeError("in the source")

    with pytest.raises(RuntimeError, match="in the source"):
        write_shards(tmp_path, batches(), max_bytes=80)
    assert os.listdir(tmp_path) == []


def test_nothing_is_removed_behind_a_link(tmp_path):
    """Whoever may write into the folder of a data set must not lead its writer elsewhere."""
    folder, private = tmp_path / "set", tmp_path / "private"
    folder.mkdir()
    private.mkdir()
    (private / "thesis.tex").write_text("all of it")
    (folder / commit.PARTIAL).symlink_to(private)
    with pytest.raises(StorageError, match="set: it is a link, or lies behind one"):
        write_shards(folder, [("train", {"x": np.zeros(2)})])
    assert os.listdir(private) == ["thesis.tex"]
    (private / "thesis.tex").unlink()
    with pytest.raises(StorageError, match="set: it is a link, or lies behind one"):
        commit.settle(folder)
    assert os.listdir(private) == []


CRASH = """
import os, signal, sys
import numpy as np
from pathlib import Path
from tests.written import write_shards

replace, left = os.replace, int(sys.argv[2])
def crash(*paths):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
os.replace = crash
write_shards(Path(sys.argv[1]), [("train", {"x": np.arange(100, 105)})], max_bytes=16)
"""


@pytest.mark.parametrize("moves", range(7))
@pytest.mark.parametrize("before", [False, True])
def test_killed_between_any_two_moves(tmp_path, moves, before):
    """The folder has the old data set, the new one or none, never a mixture of both.

    The next write leaves a complete data set and nothing else.
    """
    (tmp_path / "crash.py").write_text(CRASH)
    folder = tmp_path / "set"
    if before:  # an old data set with more shards is replaced
        old = write_shards(folder, [("train", {"x": np.arange(20)})], max_bytes=16)
    command = [sys.executable, "-m", "crash", str(folder), str(moves)]
    result = forkserver.run(command, cwd=tmp_path)
    assert result.returncode in (0, -9)
    if (folder / "index.json").exists():
        index = Index.load(folder)
        assert before or result.returncode == 0 or index.split("train").count == 5
        for shard in index.shards:
            assert digest_file(folder / shard.path) == shard.digest
        assert index.split("train").count == 5 or (before and index == old)
    new = write_shards(folder, [("train", {"x": np.arange(7)})], max_bytes=16)
    assert sorted(os.listdir(folder)) == ["index.json", *(shard.path for shard in new.shards)]
    for shard in new.shards:
        assert digest_file(folder / shard.path) == shard.digest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"train-00000.h5": "trai', "commit.json is damaged: it is not valid JSON"),
        ("[]", "commit.json is damaged: $ is `array`; it must be `object`"),
        ('{"train-00000.h5": 3}', "commit.json is damaged: $[...] is `int`; it must be `str`"),
        ('{"train-00000.h5": "../x"}', "$[...]: it must be a path that stays in the folder"),
        ('{"../x.h5": "train-00000.h5"}', "a key of $: it must be a path that stays in the fol"),
        ('{"/etc/x": "train-00000.h5"}', "a key of $: it must be a path that stays in the folder"),
        (None, "commit.json is damaged: it cannot be read (it is a link, or lies behind one)"),
    ],
)
def test_a_commit_that_is_damaged_is_refused_and_nothing_is_moved(tmp_path, content, words):
    old = write_shards(tmp_path, [("train", {"x": np.arange(5)})])
    partial = tmp_path / commit.PARTIAL
    partial.mkdir()
    if content is None:
        (partial / "commit.json").symlink_to(tmp_path / "index.json")
    else:
        (partial / "commit.json").write_text(content)
    old.save(partial)
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError) as error:
        commit.resume(tmp_path)
    assert words in str(error.value)
    assert f"is not known; remove {partial} to begin anew (" in str(error.value)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_commit_of_names_of_any_bytes_is_finished(tmp_path):
    index = write_shards(tmp_path, [("train", {"x": np.arange(5)})])
    name = os.fsdecode(b"caf\xe9.txt")
    partial = tmp_path / commit.PARTIAL
    partial.mkdir()
    (partial / name).write_text("beside")
    index.save(partial)
    shutil.copy(tmp_path / "train-00000.h5", partial)
    moves = {"train-00000.h5": "train-00000.h5", name: name}
    (partial / "commit.json").write_text(json.dumps(moves))
    assert commit.resume(tmp_path)
    assert (tmp_path / name).read_text() == "beside"
    assert Index.load(tmp_path) == index


def test_ragged():
    ragged = Ragged.of([np.array([1, 2]), np.array([], int), np.array([3])])
    assert len(ragged) == 3
    assert [ragged[i].tolist() for i in range(3)] == [[1, 2], [], [3]]
    assert ragged.lengths.tolist() == [2, 0, 1]
    assert ragged.pad().tolist() == [[1, 2], [0, 0], [3, 0]]
    assert ragged.rows(1, 3).pad().tolist() == [[0], [3]]
    points = Ragged.of([np.ones((2, 3)), np.ones((1, 3))])
    assert points.pad().shape == (2, 2, 3)
    assert Ragged.of([np.zeros(0)]).pad().shape == (1, 0)
