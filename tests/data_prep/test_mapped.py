"""A memory-mapped source file gives the right values, and a file that is cut off is an error."""

import os

import numpy as np
import pytest

from data_prep.formats.arrays import array_numpy
from data_prep.formats.arrays.array_base import Where
from data_prep.formats.arrays.array_files import open_array
from data_prep.formats.arrays.array_numpy import LEAST_BYTES, Mapped
from hpctrain.shards import format as shards

X = np.random.default_rng(0).normal(size=(600, 3, 50)).astype(np.float32)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, X)
    return path


def open_mapped(path):
    with open(path, "rb") as opened:
        return Mapped(str(path), opened.fileno())


def test_bytes_as_they_lie(file):
    content = np.frombuffer(file.read_bytes(), np.uint8)
    held = open_mapped(file)
    for start, size in ((0, content.size), (129, LEAST_BYTES), (70_001, 100_000)):
        found = held.bytes(start, size)
        np.testing.assert_array_equal(found, content[start : start + size])
        assert not found.flags.writeable
    assert held.bytes(0, LEAST_BYTES - 1) is None


def test_where_they_have_to_be_read(file, monkeypatch, tmp_path):
    (tmp_path / "small").write_bytes(bytes(100))
    assert open_mapped(tmp_path / "small").bytes(0, 100) is None
    with monkeypatch.context() as patch:
        patch.setattr(array_numpy, "POPULATE_READ", 99)  # an old kernel does not know the advice
        assert open_mapped(file).bytes(0, LEAST_BYTES) is None
    monkeypatch.setattr(array_numpy, "kind_of", lambda path: "network")
    assert open_mapped(file).bytes(0, LEAST_BYTES) is None


def test_a_file_that_is_cut_off(file):
    held = open_mapped(file)
    os.truncate(file, LEAST_BYTES // 2)
    with pytest.raises(OSError, match="Bad address"):
        held.bytes(LEAST_BYTES, LEAST_BYTES)


@pytest.mark.parametrize("map_it", [True, False])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_are_the_same(file, order, map_it, monkeypatch):
    monkeypatch.setattr(array_numpy, "LEAST_BYTES", 1 if map_it else 2**40)
    np.save(file, np.asarray(X, order=order))
    for axis in range(3):
        with open_array(Where(str(file)), axis) as array:
            stop = X.shape[axis] - 1
            found = array.rows(1, stop)
        np.testing.assert_array_equal(found, np.moveaxis(X, axis, 0)[1:stop])
    raw = file.with_suffix(".raw")
    for skip in (0, 1, 12):  # values that are not aligned are read, not mapped
        raw.write_bytes(bytes(skip) + X.tobytes())
        with open_array(Where(str(raw), f"float32:3x50:{skip}"), 0) as array:
            np.testing.assert_array_equal(array.rows(2, 600), X[2:])


def test_a_source_that_is_cut_off_before_it_is_written(tmp_path, data_prep, monkeypatch):
    """The write fails with "bad address", and the message says that the source was changed."""
    np.save(tmp_path / "x.npy", np.zeros((40, 200, 200), np.float32))
    write = shards.write_shard

    def cut(*args, **options):
        os.truncate(tmp_path / "x.npy", 2**16)
        return write(*args, **options)

    monkeypatch.setattr(shards, "write_shard", cut)
    err = data_prep.refused("arrays", tmp_path / "x.npy", tmp_path / "out")
    assert f"{tmp_path}/x.npy was changed while it was being read; run this again" in err
    assert not (tmp_path / "out" / "index.json").exists()
