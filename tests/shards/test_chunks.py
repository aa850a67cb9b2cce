import errno
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.shards.storage import chunks
from hpctrain.data.shards.storage import file as storage_file
from hpctrain.data.shards.storage.cache import ChunkCache
from hpctrain.data.shards.storage.chunks import Chunked
from hpctrain.data.shards.storage.file import File
from hpctrain.errors import DataError

FILTERS = {
    "plain": {},
    "gzip": {"compression": "gzip"},
    "gzip shuffled": {"compression": "gzip", "shuffle": True},
    "only shuffled": {"shuffle": True},
    "lz4": dict(hdf5plugin.LZ4()),
    "lz4 in blocks": {"shuffle": True, **hdf5plugin.LZ4(nbytes=1000)},
    "zstd": dict(hdf5plugin.Zstd()),
    "zstd shuffled": {"shuffle": True, **hdf5plugin.Zstd()},
}
BY_HDF5 = {
    "gzip with checksum": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "blosc": dict(hdf5plugin.Blosc(cname="lz4")),
    "blosc2": dict(hdf5plugin.Blosc2(cname="zstd")),
    "bitshuffle": dict(hdf5plugin.Bitshuffle()),
    "scaled": {"scaleoffset": 0},
    "lzf": {"compression": "lzf"},
}
IMAGES = (np.arange(50 * 3 * 20 * 17, dtype=np.uint32) ** 2 // 999).astype(np.uint16)
IMAGES = IMAGES.reshape(50, 3, 20, 17)
CHUNK = (8, 3, 20, 17)


def write(path, data=IMAGES, chunks=CHUNK, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("group/x", data=data, chunks=chunks, **options)
    return path


def read(path, cache=None, pool=None):
    """Open the dataset, and close the file unless HDF5 reads the dataset."""
    file = h5py.File(path, "r", locking=False)
    chunked = Chunked(file["group/x"], File(path), pool=pool, cache=cache or ChunkCache())
    if chunked.direct:
        file.close()
    return chunked


def stored(path):
    """Return the byte offset and the size of each chunk."""
    with h5py.File(path) as file:
        found = []
        file["group/x"].id.chunk_iter(found.append)
    return [(chunk.byte_offset, chunk.size) for chunk in found]


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def compare(chunked, expected, rows):
    rows = np.array(rows, dtype=np.int64)
    found = chunked.rows(rows)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected[rows])
    found[...] = 0  # the array belongs to the caller
    np.testing.assert_array_equal(chunked.rows(rows), expected[rows])


ROWS = [49, 0, 7, 7, 23, 8, 48, 15, 16]
# Each filter is tried with whole samples in a chunk, and a few of them with other chunks too.
FEW = ("plain", "gzip shuffled", "zstd shuffled", "blosc2")
OTHER_CHUNKS = ((5, 3, 6, 17), (64, 1, 20, 9))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        *((name, CHUNK) for name in (*FILTERS, *BY_HDF5)),
        *((name, chunks) for name in FEW for chunks in OTHER_CHUNKS),
    ],
    ids=str,
)
def test_every_filter(tmp_path, name, chunks):
    options = FILTERS.get(name) or BY_HDF5.get(name, {})
    largest = (None, *IMAGES.shape[1:])  # otherwise a chunk cannot be longer than the dataset
    path = write(tmp_path / "a.h5", chunks=chunks, maxshape=largest, **options)
    chunked = read(path)
    assert chunked.direct == (name in FILTERS)
    assert chunked.chunk_rows == chunks[0]
    compare(chunked, IMAGES, ROWS)
    compare(chunked, IMAGES, range(50))
    compare(chunked, IMAGES, [])
    out = np.empty((34, 3, 20, 17), np.uint16)
    chunked.copy(3, 37, out)
    np.testing.assert_array_equal(out, IMAGES[3:37])


@st.composite
def datasets(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    shape = [draw(st.integers(1, 40)), *shape]
    chunks = [draw(st.integers(1, size + 3)) for size in shape]
    dtype = draw(st.sampled_from(["u1", "i1", "<u2", ">i2", "<u4", "<f4", ">f8", "<f2", "<i8"]))
    rows = draw(st.lists(st.integers(0, shape[0] - 1), max_size=60))
    ends = sorted(draw(st.tuples(*[st.integers(0, shape[0])] * 2)))
    return shape, tuple(chunks), dtype, draw(st.sampled_from(list(FILTERS))), rows, ends


@settings(max_examples=40, deadline=None)
@given(dataset=datasets(), small=st.booleans())
def test_the_rows_are_those_of_h5py(tmp_path_factory, dataset, small):
    shape, chunks, dtype, name, rows, (start, stop) = dataset
    path = tmp_path_factory.mktemp("chunks") / "a.h5"
    data = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    write(path, data, chunks, maxshape=[None] * len(shape), **FILTERS[name])
    chunked = read(path, ChunkCache(100 if small else 10**6))
    compare(chunked, data, rows)
    out = np.empty((stop - start, *shape[1:]), dtype)
    chunked.copy(start, stop, out)
    np.testing.assert_array_equal(out, data[start:stop])


def test_chunks_without_filters_and_without_data(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset(
            "group/x", (50, 2), "<u2", chunks=(10, 2), compression="gzip", shuffle=True, fillvalue=7
        )
        dataset[10:20] = 1
        plain = np.full((10, 2), 3, "<u2")
        dataset.id.write_direct_chunk((20, 0), plain.tobytes(), 0b11)  # not filtered
        shuffled = plain.view(np.uint8).reshape(-1, 2).T.tobytes()
        dataset.id.write_direct_chunk((30, 0), shuffled, 0b10)  # shuffled only
    expected = np.repeat(np.array([7, 1, 3, 3, 7], "<u2"), 10)[:, None].repeat(2, axis=1)
    compare(read(path), expected, range(50))


@pytest.mark.parametrize("oddity", ["user block", "12 bits", "compressed twice", "large"])
def test_unusual_datasets_are_read_by_hdf5(tmp_path, monkeypatch, oddity):
    path, data, kind = tmp_path / "a.h5", IMAGES % 4096, h5py.h5t.STD_U16LE.copy()
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    options.set_chunk(CHUNK)
    if oddity == "large":  # a chunk has parts of more samples than fit into memory
        monkeypatch.setattr(chunks, "RUN_BYTES", 3 * IMAGES[0].nbytes)
    if oddity == "12 bits":
        kind.set_precision(12)
    if oddity == "compressed twice":
        options.set_deflate(1)
        options.set_deflate(1)
    with h5py.File(path, "w", userblock_size=512 * (oddity == "user block")) as file:
        space = h5py.h5s.create_simple(data.shape)
        dataset = h5py.h5d.create(file.create_group("group").id, b"x", kind, space, options)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, data)
    chunked = read(path)
    assert not chunked.direct
    compare(chunked, data, ROWS)


# Damage


@pytest.mark.parametrize(
    "name", [name for name in FILTERS if name not in ("plain", "only shuffled")]
)
def test_damage_names_the_samples(tmp_path, name):
    path = write(tmp_path / "a.h5", **FILTERS[name])
    offset, size = stored(path)[2]
    overwrite(path, offset, b"\xab" * size)
    chunked = read(path)
    for _ in range(2):  # the second call fails too
        with pytest.raises(DataError, match=r"a\.h5: 'group/x' is damaged in samples 16 to 23: "):
            chunked.rows(np.array([0, 17]))
    compare(chunked, IMAGES, [0, 15, 24])
    with ThreadPoolExecutor(1) as pool:
        chunked = read(path, pool=pool)
        chunked.prefetch(np.arange(50))
    with pytest.raises(DataError, match="samples 16 to 23"):
        chunked.copy(10, 20, np.empty_like(IMAGES[10:20]))


@pytest.mark.parametrize("name", ["gzip with checksum", "gzip"])
def test_one_flipped_bit_is_found(tmp_path, name):
    path = write(tmp_path / "a.h5", **(FILTERS | BY_HDF5)[name])
    offset, size = stored(path)[-1]  # the last chunk is not full
    content = path.read_bytes()
    for at in range(2, size, size // 50):
        overwrite(path, offset + at, bytes([content[offset + at] ^ 16]))
        with pytest.raises(DataError, match="samples 48 to 49"):
            read(path).rows(np.array([49]))
        overwrite(path, offset + at, content[offset + at : offset + at + 1])
    compare(read(path), IMAGES, [49])


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(list(FILTERS)),
    flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=5),
)
def test_damage_never_ends_the_process(tmp_path_factory, name, flips):
    path = write(tmp_path_factory.mktemp("damaged") / "a.h5", IMAGES[:8], **FILTERS[name])
    ((offset, size),) = stored(path)
    for at, value in flips:
        overwrite(path, offset + min(at % 400, size - 1), bytes([value]))
    try:
        assert read(path).rows(np.arange(8)).shape == (8, 3, 20, 17)
    except DataError as error:
        assert "samples 0 to 7" in str(error)  # noqa: PT017


def test_a_file_that_became_shorter(tmp_path):
    path = write(tmp_path / "a.h5", np.zeros((50, 1000), np.uint8), (8, 1000))
    chunked = read(path)
    os.truncate(path, max(offset for offset, _ in stored(path)))
    with pytest.raises(DataError, match="samples 48 to 49: the file ends at byte"):
        chunked.rows(np.array([48]))


def test_reads_that_fail_for_a_while(tmp_path, monkeypatch, caplog):
    """The test simulates EIO, because no file system produces it on demand."""
    path = write(tmp_path / "a.h5", **FILTERS["gzip"])
    left, truly = [2], os.preadv

    def failing(descriptor, buffers, offset):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return truly(descriptor, buffers, offset)

    monkeypatch.setattr(storage_file, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(os, "preadv", failing)
    with caplog.at_level(logging.WARNING):
        compare(read(path), IMAGES, ROWS)
    assert caplog.text.count("trying again") == 2
    left[0] = 3
    with pytest.raises(DataError, match=r"cannot be read in samples 8 to 15: .*Input/output error"):
        read(path).rows(np.array([9]))
    left[0] = 1
    chunked = read(path)
    write(tmp_path / "b.h5", IMAGES[:10])
    os.replace(tmp_path / "b.h5", path)
    with pytest.raises(DataError, match="has been replaced while it was read"):
        chunked.rows(np.array([9]))


WITHOUT = """
import logging, sys
from pathlib import Path
for name in sys.argv[3].split(","):
    sys.modules[name] = None
import h5py, numpy as np
from hpctrain.data.shards.storage.chunks import Chunked
from hpctrain.data.shards.storage.file import File
from hpctrain.errors import DataError
logging.basicConfig(format="%(message)s")
file = h5py.File(sys.argv[1])
for _ in range(2):
    try:
        chunked = Chunked(file["group/x"], File(Path(sys.argv[1])))
    except DataError as error:
        sys.exit(str(error))
    np.save(sys.argv[2], chunked.rows(np.arange(50)))
"""


def test_missing_libraries(tmp_path):
    path, out = write(tmp_path / "a.h5", **hdf5plugin.LZ4()), tmp_path / "rows.npy"
    call = [sys.executable, "-c", WITHOUT, path, out]
    done = subprocess.run([*call, "lz4"], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        f"{tmp_path}: 'group/x' is decoded by HDF5, slowly: the Python package lz4 is not installed"
    ]
    np.testing.assert_array_equal(np.load(out), IMAGES)
    done = subprocess.run([*call, "lz4,hdf5plugin"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"shard {path}: 'group/x' is compressed by the filter" in done.stderr
    assert (
        "(32004), which nothing installed can undo: pip install 'hpctrain[codecs]'" in done.stderr
    )
    write(path, **FILTERS["zstd shuffled"])  # without blosc2, numpy undoes the shuffle
    done = subprocess.run([*call, "blosc2"], capture_output=True, text=True, check=True)
    assert not done.stderr
    np.testing.assert_array_equal(np.load(out), IMAGES)


# Threads


@pytest.mark.parametrize("name", ["plain", "zstd"])
def test_threads_share_it(tmp_path, name):
    path = write(tmp_path / "a.h5", **FILTERS[name])
    with ThreadPoolExecutor(6) as pool:
        chunked = read(path, ChunkCache(3 * IMAGES[:8].nbytes), pool)

        def work(seed):
            for rows in np.random.default_rng(seed).integers(0, 50, (8, 16)):
                np.testing.assert_array_equal(chunked.rows(rows), IMAGES[rows])

        list(pool.map(work, range(6)))
