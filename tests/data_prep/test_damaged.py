"""Files that are damaged or odd are refused with one message that names the file."""

import os
import re
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

X = np.arange(1200, dtype="<i4").reshape(300, 4) * 7919 % 10007


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(data_prep, tmp_path):
    """Return a function that runs a command that must fail, and checks what is left behind."""

    def run(words, *args, code=3):
        before = set(tmp_path.rglob("*"))
        found, _, err = data_prep(*args)
        assert found == code
        assert err.startswith("data_prep: ")
        assert err.count("\n") == 1
        for word in (words,) if isinstance(words, str) else words:
            assert word in err
        assert set(tmp_path.rglob("*")) == before
        return err

    return run


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def stored(name):
    """Return what OUT holds of a dataset."""
    with h5py.File("OUT/train-00000.h5") as file:
        return file[name][:]


# Values that were never written


@pytest.fixture
def unfilled(tmp_path):
    """Return a NetCDF4 file whose writer has switched fill values off, as in issue 16."""
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "n.nc", "w") as file:
        file.set_fill_off()
        file.createDimension("t", 4000)
        file.createVariable("never", "i4", ("t",))
        file.createVariable("chunked", "f4", ("t",), chunksizes=(100,), zlib=True)[:150] = 5
        file.createVariable("written", "i4", ("t",))[:] = np.arange(4000)
    return tmp_path / "n.nc"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("never", "n.h5:never has 4,000 of 4,000 rows with values that were never written, and no"),
        (
            "chunked",
            "n.h5:chunked has 3,800 of 4,000 rows with values that were never written, and",
        ),
    ],
)
def test_values_that_nobody_wrote_are_no_data(unfilled, refused, name, words):
    unfilled.rename("n.h5")  # a NetCDF4 file is an HDF5 file
    refused(words, "arrays", "OUT", "--unwritten", "x", "--field", f"x=n.h5:{name}")


def test_index_refuses_chunks_that_nobody_wrote(unfilled, refused):
    unfilled.rename("n.h5")
    words = "chunked has 3,800 of 4,000 rows with values that were never written, and no fill value"
    refused(words, "index", "n.h5", "--field", "x=chunked", "--unwritten", "x")


def half_written():
    """Write an array of which nobody wrote some rows; return its address and the rows."""
    options = {"shape": (100, 4), "chunks": (10, 2), "dtype": "f4"}
    x = np.arange(1, 401, dtype="f4").reshape(100, 4)
    missing = np.arange(100) >= 50
    with h5py.File("x.h5", "w") as file:
        made = file.create_dataset("chunks", **options, fillvalue=-7)
        made[:50] = x[:50]
        made[50:, 2:] = x[50:, 2:]  # half of a row is not a row
    return "x.h5:chunks", missing


def test_rows_that_nobody_wrote_are_taken_only_on_demand(tmp_path, data_prep):
    where, missing = half_written()
    count = int(missing.sum())
    words = f" has {count} of 100 rows with values that were never written; --unwritten x takes"
    args = ("arrays", "OUT", "--field", f"x={where}")
    data_prep.refuses(3, words, *args)
    assert not (tmp_path / "OUT").exists()
    data_prep.refuses(3, f"/chunks{words}", "index", "x.h5", "--field", "x=chunks")
    more = ("--field", "x=chunks", "--unwritten", "x")
    assert data_prep("index", "x.h5", "--out", ".", *more)[0] == 0
    assert data_prep(*args, "--unwritten", "x")[0] == 0
    rows = stored("x")
    assert ((rows == -7).any(1) == missing).all()
    assert (rows[~missing] == np.arange(1, 401).reshape(100, 4)[~missing]).all()
    data_prep.refuses(2, "--unwritten: there is no field 'y'", *args, "--unwritten", "y")


# HDF5's B-tree of chunks, which has no checksum


def chunked_file(path, compression="gzip"):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(2, 4), compression=compression)


def keys(path, level):
    """Return where the nodes of one level of the B-tree have the first index of each chunk."""
    content = path.read_bytes()
    found = []
    for node in re.finditer(rb"TREE\x01" + bytes([level]), content):
        (entries,) = struct.unpack_from("<H", content, node.start() + 6)
        # Each entry: size and filter mask of the chunk, its index (2 axes and the bytes), address.
        found.append([node.start() + 24 + i * (8 + 3 * 8 + 8) + 8 for i in range(entries)])
    return found


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("outside", "lists a chunk at [516, 0], where none can be"),
        ("twice", "lists a chunk twice"),
        ("above", "HDF5 does not find the chunk at"),
    ],
)
@pytest.mark.parametrize("compression", ["gzip", None])
def test_a_damaged_btree_of_chunks(tmp_path, refused, damage, words, compression):
    path = tmp_path / "x.h5"
    chunked_file(path, compression)
    if damage == "above":
        flip(path, keys(path, 1)[0][1], 6)  # the root leads to another leaf for some chunks
    else:
        leaf = next(at for at in keys(path, 0) if not any(path.read_bytes()[at[0] :][:8]))
        flip(path, leaf[2] + (damage == "outside"), 1)
    with h5py.File(path) as file:
        assert (file["x"][:] != X).any()  # HDF5 notices nothing
    refused(["x.h5", words], "arrays", "OUT", "--field", "x=x.h5:x", "--workers", 1)
    refused(["x.h5", words], "index", "x.h5", "--field", "x=x", "--workers", 1)


def test_a_plain_chunk_of_another_size(tmp_path, refused):
    """HDF5 ignores the size, a loader does not."""
    path = tmp_path / "x.h5"
    chunked_file(path, None)
    flip(path, keys(path, 0)[0][0] - 8, 2)
    words = ["x.h5", "lists a chunk of 36 bytes, not 32"]
    refused(words, "index", "x.h5", "--field", "x=x")


def test_a_filter_that_hdf5_does_not_apply(tmp_path, refused):
    """A loader ignores the level of a compression, HDF5 checks it."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(100, 4), compression="gzip")
    flip(path, path.read_bytes().index(b"deflate\0") + 11, 5)
    with h5py.File(path) as file, pytest.raises(OSError, match="filter returned failure"):
        file["x"][:]
    refused(["x.h5", "filter returned failure"], "index", "x.h5", "--field", "x=x")


def test_a_damaged_tree_of_groups(tmp_path, refused):
    with h5py.File(tmp_path / "x.h5", "w", libver="earliest") as file:
        file["x"] = X
    flip(tmp_path / "x.h5", 152)  # an address in the B-tree of the names
    words = "x.h5 is not readable as HDF5: Object visitation failed"
    refused(words, "arrays", "OUT", "--field", "x=x.h5")


# Checksums that the source has


def test_an_npz_that_hides_an_array(tmp_path, refused):
    np.savez("x.npz", x=X, y=X)
    path = tmp_path / "x.npz"
    entry = path.read_bytes().index(b"PK\1\2")
    (size,) = struct.unpack_from("<H", path.read_bytes(), path.read_bytes().rindex(b"PK\1\2") + 28)
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, entry + 32, 46 + size)  # the next entry is taken for a comment
    path.write_bytes(content)
    assert list(np.load(path)) == ["x"]
    refused("x.npz is damaged: it says 2 arrays, and lists 1", "arrays", "x.npz", "OUT")


def test_a_page_of_parquet_that_arrow_skips(tmp_path, refused):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"text": ["some words"] * 100})
    parquet.write_table(table, "x.parquet", use_dictionary=False, row_group_size=50)
    assert (tmp_path / "x.parquet").read_bytes()[4:6] == b"\x15\x00"  # the page's type, 0
    flip(tmp_path / "x.parquet", 5)
    assert len(parquet.read_table("x.parquet")) == 50
    words = "x.parquet is damaged: 50 rows are missing"
    refused(words, "table", "x.parquet", "OUT", "--workers", 1)
    refused(words, "text", "x.parquet", "OUT", "--workers", 1)


# Odd files


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_text_of_which_nothing_is_left(tmp_path, refused, suffix):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("some text")
    (tmp_path / f"in/b.txt{suffix}").write_bytes(b"")  # gzip takes it for an empty text
    words = f"b.txt{suffix} cannot be read: it is empty, so it was cut off"
    refused(words, "text", "in", "OUT", "--workers", 1)


def test_a_refused_conversion_leaves_the_folders_that_were_there(tmp_path, data_prep):
    np.savez("x.npz", x=X)
    flip(tmp_path / "x.npz", 3000)
    (tmp_path / "mine").mkdir()
    for out in ("mine", "mine/a/b"):
        assert data_prep("arrays", "x.npz", out, "--workers", 1)[0] == 3
        assert list((tmp_path / "mine").iterdir()) == []


# Files that never end


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_source_that_is_no_regular_file(tmp_path, data_prep, kind):
    def put(name):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to("/dev/zero")
        return name

    Path("y.txt").write_text("text")
    Path("photos").mkdir()
    for path, *args in (
        (put("x.tar"), "webdataset", "x.tar"),
        (put("x.npz"), "arrays", "x.npz"),
        (put("photos.csv"), "images", "photos.csv"),
        (put("x.json"), "text", "y.txt", "--tokenizer", "x.json"),
        (put("x.py"), "python", "x.py:f"),
    ):
        code, _, err = data_prep(*args, "OUT")
        assert code in (2, 3)
        assert path in err
        assert "regular file" in err
