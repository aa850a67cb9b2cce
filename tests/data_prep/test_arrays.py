"""`data_prep arrays` converts arrays of each file format, and checks files and options."""

import contextlib
import os
import zipfile
from argparse import Namespace
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep.formats.arrays.array_files import natural, parse_where
from data_prep.options import Options
from data_prep.source import BadRecords
from data_prep.sources import arrays
from hpctrain.data.shards.index import Index
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import DataError
from tests.data_prep import read_back

COUNT = 100
X = np.random.default_rng(0).normal(size=(COUNT, 3, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with the same array X in every format."""
    folder = tmp_path_factory.mktemp("made")
    with contextlib.chdir(folder):
        make()
    return folder


def make():
    np.save("x.npy", X)
    np.save("y.npy", np.arange(COUNT))
    np.save("fortran.npy", np.asfortranarray(X))
    np.save("last.npy", np.moveaxis(X, 0, 2).copy())
    np.save("middle.npy", np.asfortranarray(np.moveaxis(X, 0, 1)))
    np.savez("plain.npz", a=X, label=np.arange(COUNT))
    np.savez_compressed("small.npz", a=X, fortran=np.asfortranarray(X), last=np.moveaxis(X, 0, 2))
    X.tofile("x.bin")
    with h5py.File("x.h5", "w") as file:
        file["group/data"] = X
        file["big"] = X.astype(">f4")
        file.create_dataset("chunked", data=X, chunks=(7, 2, 4), compression="gzip")
        file.create_dataset("last", data=np.moveaxis(X, 0, 2), chunks=(2, 4, 30))
        file["link"] = h5py.SoftLink("/group/data")


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """Change to a new folder with links to the files of `made`. Tests may add files to it."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def convert(data_prep):
    """Return a function that converts arrays to OUT and returns the rows of OUT."""

    def run(*args, said=""):
        code, out, err = data_prep("arrays", "OUT", *args, "--overwrite", "--workers", 1)
        assert (code, [line for line in err.splitlines() if " samples, " not in line]) == (0, [])
        assert said in out
        return read_back.rows("OUT")

    return run


def test_every_format_gives_the_same(here, convert):
    wheres = {
        "npy": "x.npy",
        "fortran": "fortran.npy",
        "last": "last.npy",
        "middle": "middle.npy",
        "npz": "plain.npz:a",
        "compressed": "small.npz:a",
        "compressed_fortran": "small.npz:fortran",
        "compressed_last": "small.npz:last",
        "h5": "x.h5:/group/data",
        "h5_big": "x.h5:big",
        "h5_chunked": "x.h5:chunked",
        "h5_link": "x.h5:link",
        "h5_last": "x.h5:last",
    }
    axes = {"last": 2, "middle": 1, "compressed_last": -1, "h5_last": -1}
    fields = [word for name, where in wheres.items() for word in ("--field", f"{name}={where}")]
    axis = [word for name, k in axes.items() for word in ("--axis", f"{name}={k}")]
    rows = convert(*fields, *axis, "--shard-size", "25KB", said="100 samples (train 100)")
    assert list(rows) == list(wheres)
    for name, values in rows.items():
        assert values.dtype == np.float32, name
        assert np.array_equal(values, X), name
    source = Index.load(here / "OUT").provenance["source"]
    assert source["fields"]["npz"] == {"from": f"{here}/plain.npz:a"}
    assert source["fields"]["last"] == {"from": f"{here}/last.npy", "axis": 2}


def test_numpy_files_need_no_names(here, data_prep):
    np.save("flag.npy", np.arange(COUNT) % 3 == 0)
    np.save("big.npy", np.arange(COUNT).astype(">i4"))
    code, out, err = data_prep(
        *("arrays", "x.npy", "big.npy", "flag.npy", "fortran.npy", "plain.npz", "OUT"),
        *("--field", "id=y.npy", "--shard-size", "5KB"),
    )
    assert (code, err) == (0, "")
    assert "100 samples (train 100)" in out
    reader = Reader(here / "OUT", "train")
    assert [f"{name} {field}" for name, field in reader.fields.items()] == [
        *("x float32[3, 4]", "big int32", "flag uint8", "fortran float32[3, 4]"),
        *("a float32[3, 4]", "label int64", "id int64"),
    ]
    rows = read_back.rows("OUT")
    for name, file in {"x": "x", "big": "big", "flag": "flag", "id": "y"}.items():
        assert np.array_equal(rows[name], np.load(f"{file}.npy"))


# Tests of several files as one field


def test_files_one_behind_the_other(here, convert):
    for i in (1, 2, 10):
        np.save(f"run{i}.npy", np.full((i, 2), i))
    expected = np.concatenate([np.full((i, 2), i) for i in (1, 2, 10)])
    np.save("all.npy", np.arange(13))
    rows = convert("--field", "u=run*.npy", "--field", "n=all.npy", "--shard-size", "60KB")
    assert np.array_equal(rows["u"], expected)
    one = Index.load(here / "OUT").digest
    three = [word for i in (1, 2, 10) for word in ("--field", f"u=run{i}.npy")]
    rows = convert(*three, "--field", "n=all.npy", "--shard-size", "60KB")
    assert Index.load(here / "OUT").digest == one
    rows = convert("--field", "u=run10.npy", "--field", "u=run[12].npy", "--shard-size", "1KB")
    assert rows["u"][:, 0].tolist() == [10] * 10 + [1, 2, 2]


def test_a_split_by_the_files_of_the_first_field(here, data_prep):
    for i in (1, 2, 10):
        np.save(f"run{i}.npy", np.full((i, 2), i))
    np.save("all.npy", np.arange(13))
    split = "file:test=run2*,train=run*"
    command = ("--field", "u=run*.npy", "--field", "n=all.npy", "--split", split)
    code, _, err = data_prep("arrays", "OUT", *command)
    assert (code, err) == (0, "")
    assert read_back.rows("OUT", "test")["n"].tolist() == [1, 2]
    assert read_back.rows("OUT", "train")["n"].tolist() == [0, *range(3, 13)]
    err = data_prep.refused("arrays", "OUT2", "--field", "u=run*.npy", "--split", "file:a=run1*")
    assert "no pattern matches run2.npy" in err


def test_natural_order():
    names = ["t10.nc", "t2.nc", "t02.nc", "t1b.nc", "t.nc", "t²3.nc"]
    assert sorted(names, key=natural) == ["t1b.nc", "t02.nc", "t2.nc", "t10.nc", "t.nc", "t²3.nc"]


def test_odd_names(here, convert):
    odd = "a b:c=d [1]*ü\n.npy"
    np.save(odd, X)
    np.save("a b:c=d 1ü.npy", X)  # the first name, read as a pattern, matches this one
    assert np.array_equal(convert("--field", f"x={odd}")["x"], X)
    os.rename("x.h5", "with:colon.h5")
    assert np.array_equal(convert("--field", "x=with:colon.h5:/group/data")["x"], X)
    assert np.array_equal(convert("--field", "x=with:col*.h5:/group/data")["x"], X)
    os.symlink("with:colon.h5", "link.h5")
    assert np.array_equal(convert("--field", "x=link.h5:/group/data")["x"], X)
    assert [str(where) for where in parse_where("no/such:a:b")] == ["no/such:a:b"]


def test_another_array_of_the_same_file_is_another_data_set(here, data_prep):
    with h5py.File("two.h5", "w") as file:
        file["a"], file["b"] = X, X + 1
    assert data_prep("arrays", "OUT", "--field", "x=two.h5:a")[0] == 0
    assert "already holds" in data_prep("arrays", "OUT", "--field", "x=two.h5:a")[1]
    for other in (["--field", "x=two.h5:b"], ["--field", "x=two.h5:a", "--cast", "x=float64"]):
        assert "holds another data set" in data_prep("arrays", "OUT", *other)[2]


# Tests of values


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"scale_factor": np.float32(0.5), "add_offset": np.float32(20)}, "scale_factor"),
        ({"add_offset": 1}, "add_offset"),
        ({"scale_factor": "two"}, "scale_factor"),
        ({"_FillValue": np.int16(-999)}, "_FillValue"),
        ({"missing_value": np.array([1.0, np.nan])}, "missing_value"),
        ({"valid_range": [1, 3]}, "valid_range"),
        ({"_Unsigned": "true"}, "_Unsigned"),
        ({"scale_factor": 1.0, "add_offset": np.zeros(1), "_FillValue": np.nan}, ""),
    ],
)
def test_packed_numbers_are_refused(tmp_path, monkeypatch, data_prep, attributes, named):
    """What is stored are not the values: a training would see other numbers."""
    monkeypatch.chdir(tmp_path)
    with h5py.File("p.h5", "w") as file:
        file["v"] = np.arange(6)
        file["v"].attrs.update(attributes)
    for command in (("arrays", "OUT", "--field", "v=p.h5:v"), ("index", "p.h5", "--field", "v=v")):
        code, _, err = data_prep(*command)
        assert code == (3 if named else 0)
        assert f"has the attribute {named}: its numbers are packed" in err or not named


def test_netcdf_by_the_function_of_the_page(tmp_path, monkeypatch, data_prep):
    netcdf = pytest.importorskip("netCDF4", reason="netCDF4 is not installed")
    monkeypatch.chdir(tmp_path)
    read_back.function_of_the_page("nc.py")
    with netcdf.Dataset("p.nc", "w") as file:
        for name, size in {"t": 6, "x": 2}.items():
            file.createDimension(name, size)
        packed = file.createVariable("x", "i2", ("t", "x"), fill_value=-999)
        packed.scale_factor, packed.add_offset = np.float32(0.5), np.float32(20)
        packed[:] = np.ma.masked_equal(np.arange(12).reshape(6, 2) / 2 + 20, 21)
    assert data_prep("python", "nc.py:samples", "OUT", "--arg", "path=p.nc")[0] == 0
    expected = np.arange(12, dtype="f4").reshape(6, 2) / 2 + 20
    expected[1, 0] = np.nan
    assert np.array_equal(read_back.rows("OUT")["x"], expected, equal_nan=True)


def test_a_cast_makes_files_of_two_dtypes_one_field(here, data_prep, convert):
    np.save("a.npy", np.array([1, 2], "i2"))
    np.save("b.npy", np.array([3.0, 2.5]))
    err = data_prep.refused("arrays", "OUT", "--field", "x=a.npy", "--field", "x=b.npy")
    assert "a.npy holds samples of int16, b.npy of float64; --cast x=DTYPE makes them one" in err
    both = ("--field", "x=a.npy", "--field", "x=b.npy", "--cast")
    assert convert(*both, "x=float32")["x"].tolist() == [1, 2, 3, 2.5]
    err = data_prep.refused("arrays", "OUT2", *both, "x=int32")
    assert "b.npy: row 1: field 'x': 2.5 is no int32" in err  # each file counts its own rows


def test_a_bool_that_is_none(here, data_prep):
    np.save("b.npy", np.array([0, 1, 2], np.uint8).view(bool))
    err = data_prep.refused("arrays", "OUT", "--field", "b=b.npy")
    assert "b.npy: row 2: field 'b'" in err


# Tests of errors


def damaged(name):
    """Write a file that cannot be read at all, or not without an option, and return its name."""
    match name:
        case "object.npy":
            np.save(name, np.array([{}] * COUNT, dtype=object), allow_pickle=True)
        case "object.npz":
            np.savez(name, o=np.array([{}] * COUNT, dtype=object))
        case "two.npy":
            with open(name, "wb") as file:
                np.save(file, X)
                np.save(file, X)
        case "twice.npz":
            with zipfile.ZipFile(name, "w") as archive:
                archive.write("x.npy", "x.npy")
                with pytest.warns(UserWarning, match="Duplicate name"):
                    archive.write("x.npy", "x.npy")
        case "huge.npy":
            header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000000000,)}\n"
            Path(name).write_bytes(b"\x93NUMPY\x01\x00" + bytes([len(header), 0]) + header)
        case "links.h5":
            with h5py.File(name, "w") as file:
                file["out"] = h5py.ExternalLink("x.h5", "/group/data")
                file["soft"] = h5py.SoftLink("/out")
                file["loop"] = h5py.SoftLink("/loop")
                file["null"] = h5py.Empty("f4")
                file["texts"] = [["a", "b"]] * COUNT
                layout = h5py.VirtualLayout(X.shape, "f4")
                layout[:] = h5py.VirtualSource("x.h5", "big", X.shape)
                file.create_virtual_dataset("virtual", layout)
                file.create_dataset("raw", X.shape, "f4", external=[("x.bin", 0, X.nbytes)])
        case "folder.npy" | "folder.h5":
            os.mkdir(name)
        case "pipe.npy":
            os.mkfifo(name)
        case _ if name.startswith("noise."):
            Path(name).write_bytes(np.random.default_rng(1).bytes(3000))
    return name


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nope.npy", "nope.npy cannot be read: No such file"),
        ("object.npy", "object.npy is not readable as NumPy: Array can't be memory-mapped: Python"),
        ("object.npz", "object.npz is of dtype object: save arrays of numbers"),
        ("two.npy", "two.npy: its header says 4,800 bytes of data, 9,728 are there; a file"),
        ("twice.npz:x", "twice.npz holds 'x' twice"),
        ("huge.npy", "huge.npy is not readable as NumPy: "),
        ("noise.npy", "noise.npy is not readable as NumPy: the magic string is not correct"),
        ("folder.npy", "folder.npy is a folder"),
        ("pipe.npy", "pipe.npy is not a file"),
        ("links.h5:out", "is a link into x.h5; write a function"),
        ("links.h5:virtual", "is a virtual dataset, of "),
        ("links.h5:raw", "is stored in the file x.bin; write a function"),
        ("links.h5:loop", "its links lead in a circle"),
        ("links.h5:null", "has no shape"),
        ("links.h5:texts", "links.h5:texts is text: it has several texts in a sample"),
        ("x.h5:group", "x.h5:group is a group; name one of the arrays in it"),
    ],
)
def test_files_that_cannot_be_read(here, data_prep, where, words):
    damaged(where.partition(":")[0])
    command = ("arrays", "OUT", "--field", f"x={where}", "--workers", 1)
    assert words in data_prep.refused(*command)
    assert not list(here.glob("OUT/*.h5"))
    assert not list(here.glob("OUT/index.json"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give .npy or .npz files before OUT, or --field NAME=FILE"),
        (["--field", "x"], "--field 'x' is not NAME=FILE"),
        (["--field", "x=x.h5"], "x.h5 holds several arrays; there are: /big >f4"),
        (["--field", "x=x.h5:/nope"], "x.h5 has no array '/nope'; there are: /big"),
        (["--field", "x=plain.npz"], "plain.npz holds several arrays; there are: a; label."),
        (["--field", "x=nope*.npy"], "no file matches 'nope*.npy'"),
        (["--field", "x=x.npy:a"], "a .npy file holds one array, and takes no key"),
        (["--field", "x=x.bin"], "x.bin: its name does not say what it is; FILE.npy, "),
        (["--field", "x=x.npy", "--field", "x=x.npy"], "x.npy is there twice in the field 'x'"),
        (["--field", "x y=x.npy"], "field 'x y': a name has letters"),
        (["--field", "x=x.npy", "--axis", "x=3"], "--axis 3: x.npy has 3 axes, (100, 3, 4)"),
        (["--field", "x=x.npy", "--axis", "x=--1"], "'--1' is not the number of an axis, from 0"),
        (["--field", "x=x.npy", "--axis", "x"], "--axis 'x' is not NAME=K"),
        (["--field", "x=x.npy", "--cast", "y=int8"], "--cast: there is no field 'y'"),
        (["--field", "x=x.npy", "--cast", "x=double"], "--cast: 'double' is not one of uint8"),
    ],
)
def test_options_that_cannot_be(here, data_prep, args, words):
    assert words in data_prep.refused("arrays", "OUT", *args, code=2)
    assert not (here / "OUT").exists()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array(3), "v.npy is a single value"),
        (np.zeros((0, 3)), "v.npy has no samples"),
        (np.zeros((5, 0)), "v.npy: shape [0] has no elements"),
        (np.zeros(5, complex), "v.npy is of dtype complex128: save arrays of numbers"),
        (np.zeros(5, np.uint64), "dtype uint64 is not supported; allowed: uint8, "),
        (np.zeros(5, np.uint64), "--cast v=int64 stores it, checked"),
        (np.zeros(5, np.longdouble), "dtype float128 is not supported"),
        (np.zeros(5, [("a", "f4"), ("b", "i4")]), "is of dtype [('a', '<f4'), ('b', '<i4')]"),
        (np.array([["a", "b"]]), "v.npy is text: it has several texts in a sample"),
        (np.zeros(5, "M8[s]"), "datetime64[s]: save arrays of numbers (dates as int64"),
    ],
)
def test_arrays_that_cannot_be_stored(here, data_prep, array, words):
    np.save("v.npy", array)
    for args in (["v.npy", "OUT"], ["OUT", "--field", "v=v.npy"]):
        assert words in data_prep.refused("arrays", *args)
        assert not (here / "OUT").exists()


def test_numpy_files_whose_names_are_no_fields(here, data_prep):
    np.save("two words.npy", X)
    err = data_prep.refused("arrays", "two words.npy", "OUT", code=2)
    assert "--field NAME=two words.npy gives another" in err
    os.mkdir("sub")
    np.save("sub/x.npy", X)
    err = data_prep.refused("arrays", "x.npy", "sub/x.npy", "OUT", code=2)
    assert "x.npy and sub/x.npy would both be the field 'x'; give both with --field" in err
    err = data_prep.refused("arrays", "x.npy", "OUT", "--field", "x=y.npy", code=2)
    assert "x.npy and y.npy would both be the field 'x'" in err
    for name in ("x.h5", "x.bin"):
        err = data_prep.refused("arrays", name, "OUT", code=2)
    np.save("mask.npy", X)
    assert "a field cannot be named 'mask'" in data_prep("arrays", "mask.npy", "OUT")[2]


def test_counts_and_shapes_that_differ(here, data_prep):
    np.save("short.npy", X[:5])
    err = data_prep.refused("arrays", "x.npy", "short.npy", "OUT")
    assert "x.npy has 100 samples, short.npy has 5" in err
    err = data_prep.refused("arrays", "OUT", "--field", "x=x.npy", "--field", "x=last.npy")
    assert "x.npy holds samples of float32[3, 4], last.npy of float32[4, 100]" in err


# Tests of files that change, and of large files


def of(field, shard_bytes):
    args = Namespace(files=[], field=[field], axis=[], cast=[], unwritten=[])
    return arrays.source(args, Options(shard_bytes))


def test_a_source_that_is_cut_off_while_it_is_read(here):
    np.save("long.npy", np.zeros((100, 100_000)))
    source = of("x=long.npy", 2**30)
    blocks = source.read(source.pieces[0].what, BadRecords("stop"))
    next(blocks)
    os.truncate("long.npy", 10_000_000)
    with pytest.raises(DataError, match=r"long\.npy was cut off while it was being read"):
        list(blocks)
    np.save("new.npy", np.zeros(3))
    source = of("y=new.npy", 2**30)
    np.save("new.npy", np.zeros(2))
    with pytest.raises(DataError, match=r"new\.npy was changed while it was being read"):
        list(source.read(source.pieces[0].what, BadRecords("stop")))


def test_reading_goes_on_in_a_compressed_npz(here):
    """Pieces of a compressed stream can be read in any order."""
    source = of("x=small.npz:a", 480)
    order = [*range(len(source.pieces)), 0, 5, 3]
    for number in order:
        start, stop = source.pieces[number].what
        (block,) = source.read((start, stop), BadRecords("stop"))
        assert np.array_equal(block.values["x"], X[start:stop])
