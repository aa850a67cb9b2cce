"""Files with a group per sample, sparse matrices, MATLAB's files, text that names the splits."""

import os
import shlex

import h5py
import numpy as np
import pytest

from hpctrain.shards.index import Index
from tests.data_prep import read_back

COUNT = 24
RNG = np.random.default_rng(0)
EEG = RNG.normal(size=(COUNT, 4, 16)).astype(np.float32)
SPLITS = ["train", "val", "test"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recordings():
    """Write a file with a group per sample, whose names are not in natural order in the file."""
    with h5py.File("rec.h5", "w") as file:
        for i in range(COUNT):
            group = file.create_group(f"rec_{i}")
            group["eeg"] = EEG[i]
            group["ragged"] = EEG[i, :, : 5 + i % 7]
            group["events"] = np.arange(i, dtype=np.int32)
            group["age"] = 20 + i
            group["name"] = f"räc {i}"
            group.attrs["label"] = i % 3
            group.attrs["split"] = SPLITS[i % 3]
            group["eeg"].attrs["rate"] = 100.0 + i
        file["meta"] = np.zeros(3)


def field(**keys):
    return [word for name, key in keys.items() for word in ("--field", f"{name}=rec.h5:{key}")]


def said(err):
    return [line for line in err.splitlines() if " samples/s" not in line]


@pytest.mark.parametrize("shard_size", ["2KB", pytest.param("256MiB", marks=pytest.mark.slow)])
def test_each_group_is_a_sample(recordings, data_prep, shard_size):
    fields = {
        "eeg": "/rec_*/eeg",
        "events": "rec_*/events",
        "age": "/*/age",
        "name": "/rec_*/name",
        "label": "/rec_*@label",
        "rate": "/rec_*/eeg@rate",
    }
    args = ("arrays", "OUT", *field(**fields), "--shard-size", shard_size)
    code, _, err = data_prep(*args)
    assert (code, said(err)) == (0, [])
    rows = read_back.rows()
    assert (rows["eeg"] == EEG).all()
    assert rows["age"].tolist() == list(range(20, 20 + COUNT))
    assert rows["label"].tolist() == [i % 3 for i in range(COUNT)]
    assert rows["rate"].tolist() == [100.0 + i for i in range(COUNT)]
    assert [len(events) for events in rows["events"]] == list(range(COUNT))
    assert [bytes(name).decode() for name in rows["name"]] == [f"räc {i}" for i in range(COUNT)]
    fields = Index.load("OUT").fields
    assert [str(fields[name]) for name in ("eeg", "events", "name")] == [
        *("float32[4, 16]", "int32[*]", "uint8[*]")
    ]
    assert "already holds this data set" in data_prep(*args)[1]


def test_lengths_that_vary_along_another_axis(recordings, data_prep):
    code, _, err = data_prep("arrays", "OUT", *field(x="/rec_*/ragged"), "--cast", "x=float64")
    assert code == 0
    assert "field 'x': the length varies along axis 1 of rec.h5:/rec_0/ragged, [4, 5]" in err
    assert str(Index.load("OUT").fields["x"]) == "float64[*, 4]"
    for i, x in enumerate(read_back.rows()["x"]):
        assert (x == EEG[i, :, : 5 + i % 7].T).all()


def test_a_pattern_with_an_axis_joins(recordings, data_prep):
    assert data_prep("arrays", "OUT", *field(x="/rec_*/eeg"), "--axis", "x=-1")[0] == 0
    assert (read_back.rows()["x"] == np.moveaxis(EEG, 2, 1).reshape(-1, 4)).all()


def test_a_file_per_sample(data_prep):
    for i in range(12):
        np.save(f"sim{i}.npy", EEG[i])
        np.savez(f"sim{i}.npz", u=EEG[i], t=float(i))
        with h5py.File(f"sim{i}.h5", "w") as file:
            file["u"] = EEG[i]
            file.attrs["re"] = i
    args = [
        *("--field", "a=sim*.npy", "--field", "b=sim*.npz:u", "--field", "c=sim*.h5:u"),
        *("--field", "re=sim*.h5:/@re", "--field", "t=sim*.npz:t"),
    ]
    axes = [word for name in ("a", "b", "c", "re", "t") for word in ("--axis", f"{name}=none")]
    assert data_prep("arrays", "OUT", *args, *axes)[0] == 0
    rows = read_back.rows()
    for name in "abc":
        assert (rows[name] == EEG[:12]).all()
    assert rows["re"].tolist() == rows["t"].tolist() == list(range(12))


def test_text_names_the_split(recordings, data_prep):
    args = field(age="/*/age", part="/rec_*@split")
    code, out, err = data_prep("arrays", "OUT", *args, "--split", "column:part")
    assert (code, said(err)) == (0, [])
    assert "(train 8, val 8, test 8)" in out
    for number, split in enumerate(SPLITS):
        assert read_back.rows("OUT", split)["age"].tolist() == list(range(20 + number, 44, 3))
    np.save("x.npy", np.arange(6))
    np.save("part.npy", np.array(["train", "val"] * 3))
    np.save("fold.npy", np.array([0, 1] * 3))
    names = ("x.npy", "part.npy", "fold.npy")
    assert data_prep("arrays", *names, "O2", "--split", "column:part")[0] == 0
    assert read_back.rows("O2", "val")["x"].tolist() == [1, 3, 5]
    assert data_prep("arrays", *names, "O3", "--split", "column:fold")[0] == 0
    assert read_back.rows("O3", "0")["x"].tolist() == [0, 2, 4]
    err = data_prep("arrays", *names, "O4", "--split", "column:y")[2]
    assert "arrays has no such column to go by; it has x, part, fold" in err


def test_groups_that_lack_an_array(recordings, data_prep):
    with h5py.File("rec.h5", "a") as file:
        del file["rec_7/age"]
        file["rec_30/extra"] = 1
    err = data_prep("arrays", "OUT", *field(eeg="/*/eeg"))[2]
    assert "note: rec.h5:/*/eeg has nothing at /rec_30/eeg: left out" in err
    code, _, err = data_prep("arrays", "O2", *field(eeg="/rec_*/eeg", age="/rec_*/age"))
    assert code == 2
    assert "the fields 'eeg' and 'age' match different groups: 'age' has nothing beside" in err
    assert "rec.h5:/rec_7/eeg" in err
    assert (
        "nothing in rec.h5 matches '/r_*/eeg'" in data_prep("arrays", "O", *field(x="/r_*/eeg"))[2]
    )


def test_shapes_that_are_no_field(recordings, data_prep):
    with h5py.File("rec.h5", "a") as file:
        del file["rec_3/eeg"]
        file["rec_3/eeg"] = np.zeros((5, 17), np.float32)
        del file["rec_4/age"]
        file["rec_4/age"] = 1.5
    err = data_prep("arrays", "OUT", *field(x="/rec_*/eeg"))[2]
    assert "holds samples of float32[4, 16], rec.h5:/rec_3/eeg of float32[5, 17]" in err
    assert "the length may vary along one axis" in err
    err = data_prep("arrays", "OUT", *field(x="/rec_*/age"))[2]
    assert "rec.h5:/rec_4/age of float64; --cast x=DTYPE makes them one" in err


def test_the_command_for_nested_groups_names_each_field_once(data_prep):
    with h5py.File("demos.h5", "w") as file:
        for i in range(12):
            for name in ("obs/pos", "next_obs/pos", "actions"):
                file[f"data/demo_{i}/{name}"] = np.full((3 + i, 2), i, "f4")
    said = data_prep("arrays", "OUT", "--field", "x=demos.h5")[2]
    command = shlex.split(said.partition("`python -m data_prep ")[2].partition("`")[0])
    assert data_prep(*command)[0] == 0
    index = Index.load("OUT")
    assert [*index.fields] == ["actions", "next_obs_pos", "obs_pos"]
    assert index.split("train").count == 12  # one field with both was 24 samples


@pytest.mark.parametrize("command", ["arrays", "index"])
def test_it_is_said_that_a_file_has_a_group_per_sample(recordings, data_prep, command):
    look = {"arrays": ["arrays", "OUT", "--field", "x=rec.h5"], "index": ["index", "rec.h5"]}[
        command
    ]
    code, _, err = data_prep(*look)
    assert code == 2
    assert "24 arrays at /rec_*/age, which look like a group per sample" in err
    assert "python -m data_prep arrays OUT --field 'age=rec.h5:/rec_*/age' --field 'eeg=" in err
    one = {
        "arrays": ["arrays", "OUT", "--field", "x=rec.h5:/rec_3/eeg"],
        "index": ["index", "rec.h5", "--field", "x=/rec_3/eeg"],
    }[command]
    data_prep.refuses(
        2,
        "rec.h5:/rec_3/eeg has 4 rows, each of which would be a sample; the file has 24 arrays",
        *one,
    )
    code, out, _ = data_prep(*one, "--axis", "x=0")
    assert (code, "4 samples" in out) == (0, True)


def test_an_index_has_no_patterns(recordings, data_prep):
    code, _, err = data_prep("index", "rec.h5", "--field", "x=/rec_*/eeg")
    assert code == 3
    assert f"`python -m data_prep arrays OUT --field 'NAME={os.getcwd()}/rec.h5:/rec_*/eeg'`" in err


def test_variables_are_no_samples(data_prep):
    with h5py.File("v.h5", "w") as file:
        for i in range(20):
            file[f"v{chr(97 + i)}"] = np.arange(5)
            file[f"run{i}/u"] = np.zeros((100, 2)) + i
    err = data_prep("arrays", "OUT", "--field", "x=v.h5:va")[2]
    assert said(err) == []
    code, _, err = data_prep("arrays", "O2", "--field", "x=v.h5:/run3/u")
    assert code == 0
    assert (
        "note: v.h5:/run3/u has 100 rows, each of which would be a sample; the file has 20" in err
    )
    assert (read_back.rows("O2")["x"] == 3).all()


# Sparse matrices

DENSE = np.where(RNG.random((30, 7)) < 0.3, RNG.normal(size=(30, 7)), 0).astype(np.float32)


def sparse_group(file, name, matrix, kind):
    group = file.create_group(name)
    encoding = f"{kind}_matrix"  # anndata writes text of any length, other programs bytes
    group.attrs["encoding-type"] = encoding if kind == "csr" else np.bytes_(encoding)
    group.attrs["encoding-version"] = "0.1.0"
    group.attrs["shape"] = matrix.shape
    for part in ("data", "indices", "indptr"):
        group[part] = getattr(matrix, part)


@pytest.fixture
def cells():
    from scipy import sparse

    with h5py.File("cells.h5ad", "w") as file:
        sparse_group(file, "X", sparse.csr_matrix(DENSE), "csr")
        sparse_group(file, "layers/counts", sparse.csc_matrix(DENSE), "csc")
        file["obs/type/codes"] = np.arange(30, dtype=np.int8) % 3
        file["obs/type/categories"] = ["B", "NK", "T"]


def test_sparse_rows_become_dense(cells, data_prep):
    fields = ("--field", "x=cells.h5ad:/X", "--field", "type=cells.h5ad:/obs/type/codes")
    code, _, err = data_prep("arrays", "OUT", *fields, "--shard-size", "1KB")
    assert (code, said(err)) == (0, [])
    rows = read_back.rows()
    assert (rows["x"] == DENSE).all()
    assert rows["type"].tolist() == [i % 3 for i in range(30)]
    genes = ("--field", "x=cells.h5ad:/layers/counts", "--axis", "x=1")
    assert data_prep("arrays", "O2", *genes)[0] == 0
    assert (read_back.rows("O2")["x"] == DENSE.T).all()


def test_sparse_columns_are_refused_with_the_cure(cells, data_prep):
    code, _, err = data_prep("arrays", "OUT", "--field", "x=cells.h5ad:/layers/counts")
    assert code == 3
    assert "cells.h5ad:/layers/counts is a sparse matrix stored by columns" in err
    assert "data.X = data.X.tocsr()" in err
    err = data_prep("arrays", "OUT", "--field", "x=cells.h5ad:/X", "--axis", "x=1")[2]
    assert "stored by rows" in err


def test_parts_of_a_sparse_matrix_are_no_samples(cells, data_prep):
    code, _, err = data_prep("arrays", "OUT", "--field", "x=cells.h5ad:/X/data")
    assert code == 3
    assert "is a part of the sparse matrix /X; name the matrix" in err
    err = data_prep("arrays", "OUT", "--field", "x=cells.h5ad")[2]
    assert "/X sparse matrix" in err
    assert "/X/data" not in err
    err = data_prep("arrays", "OUT", "--field", "x=cells.h5ad:/obs/type")[2]
    assert "is a group; name one of the arrays in it: categories, codes" in err
    err = data_prep("index", "cells.h5ad", "--field", "x=/X/data")[2]
    assert "is a part of the sparse matrix /X" in err
    err = data_prep("index", "cells.h5ad", "--field", "x=/X")[2]
    assert "/X is a sparse matrix; `python -m data_prep arrays OUT --field NAME=" in err


def test_a_sparse_matrix_whose_values_lie_in_another_file(cells, data_prep):
    with h5py.File("cells.h5ad", "a") as file, h5py.File("other.h5", "w") as other:
        other["data"] = file["X/data"][()]
        del file["X/data"]
        file["X/data"] = h5py.ExternalLink("other.h5", "/data")
    code, _, err = data_prep("arrays", "OUT", "--field", "x=cells.h5ad:/X")
    assert code == 3
    assert "cells.h5ad:/X is a sparse matrix without data in this file" in err


@pytest.mark.parametrize("damage", ["indices", "indptr"])
def test_a_damaged_sparse_matrix(cells, data_prep, damage):
    with h5py.File("cells.h5ad", "a") as file:
        file[f"X/{damage}"][3] = 1000
    data_prep.refuses(3, "cells.h5ad:/X is damaged", "arrays", "OUT", "--field", "x=cells.h5ad:/X")


@pytest.mark.parametrize("kind", ["scipy", "zarr", "10x"])
def test_sparse_matrices_of_other_programs(data_prep, kind):
    import zarr
    from scipy import sparse

    matrix = sparse.csr_matrix(DENSE)
    match kind:
        case "scipy":
            sparse.save_npz("s.npz", matrix)
            for args in (["s.npz"], ["--field", "x=s.npz:data"]):
                code, _, err = data_prep("arrays", *args, "OUT")
                assert (code, "s.npz is a sparse matrix of SciPy" in err) == (3, True)
        case "zarr":
            group = zarr.open_group("s.zarr", mode="w").create_group("X")
            group.attrs["encoding-type"] = "csr_matrix"
            group.create_array("data", data=matrix.data)
            for key in ("X", "X/data"):
                code, _, err = data_prep("arrays", "OUT", "--field", f"x=s.zarr:{key}")
                assert (code, "is a sparse matrix, or a part of one" in err) == (3, True)
        case "10x":
            with h5py.File("s.h5", "w") as file:
                for part in ("data", "indices", "indptr"):
                    file[f"matrix/{part}"] = getattr(matrix, part)  # of cells, as columns
                file["matrix/shape"] = np.array(DENSE.T.shape, np.int32)
            assert "stored by columns" in data_prep("arrays", "O", "--field", "x=s.h5:/matrix")[2]
            args = ("--field", "x=s.h5:/matrix", "--axis", "x=1")
            assert data_prep("arrays", "OUT", *args)[0] == 0
            assert (read_back.rows()["x"] == DENSE).all()


# MATLAB

IMAGES = RNG.normal(size=(40, 3, 5))  # in MATLAB: 40 images of 3x5


@pytest.fixture
def matlab():
    """Write what MATLAB's `save -v7.3` writes: a header of 512 bytes, and reversed axes."""
    with h5py.File("m.mat", "w", userblock_size=512) as file:

        def put(name, value, kind, **attributes):
            file[name] = value
            file[name].attrs["MATLAB_class"] = np.bytes_(kind)
            for key, content in attributes.items():
                file[name].attrs[key] = content

        put("images", IMAGES.T, "double")
        put("labels", np.arange(40, dtype=np.int32)[None], "int32")
        put("empty", np.array([0, 0], np.uint64), "double", MATLAB_empty=np.uint8(1))
        put("name", np.array([[104], [105]], np.uint16), "char", MATLAB_int_decode=np.int32(2))
        file["#refs#/a"] = np.zeros((2, 2))
        reference = np.array([[file["#refs#/a"].ref]], h5py.ref_dtype)
        put("cells", reference, "cell")
        file.create_group("s").attrs["MATLAB_class"] = np.bytes_("struct")
        put("s/x", IMAGES[:, :, 0].T, "double")
        file["array/x"] = reference
        file["array"].attrs["MATLAB_class"] = np.bytes_("struct")
        put("text", np.zeros((1, 6), np.uint32), "string", MATLAB_object_decode=np.int32(3))
        group = file.create_group("sparse")
        group.attrs["MATLAB_class"], group.attrs["MATLAB_sparse"] = np.bytes_("double"), 7
        from scipy import sparse

        matrix = sparse.csc_matrix(DENSE.T)  # 7x30 in MATLAB
        group["data"], group["ir"], group["jc"] = matrix.data, matrix.indices, matrix.indptr
    with open("m.mat", "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\0\2IM")


def test_reversed_axes_are_said(matlab, data_prep):
    args = [word for name in ("images", "labels") for word in ("--field", f"{name}=m.mat:{name}")]
    err = data_prep("arrays", "OUT", *args)[2]
    words = (
        "/images is 40x3x5 in MATLAB and 5x3x40 in HDF5, where the axes are reversed: axis 0 "
        "counts 5 samples of [3, 40]; --axis NAME=-1 takes MATLAB's first axis"
    )
    assert words in err
    axes = ("--axis", "images=-1", "--axis", "labels=-1")
    data_prep.refuses(0, "axis 2 counts 40 samples of [5, 3]", "arrays", "OUT", *args, *axes)
    assert (read_back.rows()["images"] == np.moveaxis(IMAGES, 1, 2)).all()
    assert read_back.rows()["labels"].tolist() == [[i] for i in range(40)]
    err = data_prep("index", "m.mat", "--field", "images=images")[2]
    assert words in err
    assert (read_back.rows(".")["images"] == IMAGES.T).all()


def test_numbered_variables_of_matlab_are_samples(data_prep):
    values = [RNG.random((100 + i, 3)) for i in range(12)]
    with h5py.File("p.mat", "w", userblock_size=512) as file:
        for i, value in enumerate(values):
            file[f"x{i}"] = value.T
            file[f"x{i}"].attrs["MATLAB_class"] = np.bytes_("double")
    err = data_prep("arrays", "OUT", "--field", "x=p.mat:/x*")[2]
    assert "each sample [3, 100] has MATLAB's axes in reversed order; field 'x': the length" in err
    assert all((x == value).all() for x, value in zip(read_back.rows()["x"], values, strict=True))


def test_what_only_matlab_can_read(matlab, data_prep):
    for key, words in {
        "cells": "is a cell array of MATLAB",
        "array/x": "is an array of references",
        "s": "is a struct of MATLAB; name one of its members: x",
        "empty": "is empty in MATLAB ([])",
        "name": "is text of MATLAB",
        "text": "is of MATLAB's class string",
    }.items():
        for command in (
            ("arrays", "OUT", "--field", f"x=m.mat:/{key}"),
            ("index", "m.mat", "--field", f"x=/{key}"),
        ):
            data_prep.refuses(3, words, *command)
    assert "#refs#" not in data_prep("arrays", "OUT", "--field", "x=m.mat")[2]
    assert data_prep("arrays", "OUT", "--field", "x=m.mat:/s/x", "--axis", "x=1")[0] == 0
    assert (read_back.rows()["x"] == IMAGES[:, :, 0]).all()


def test_a_sparse_matrix_of_matlab(matlab, data_prep):
    err = data_prep("arrays", "OUT", "--field", "x=m.mat:/sparse")[2]
    assert "/sparse is 7x30 in MATLAB and 30x7 in HDF5" in err
    assert (read_back.rows()["x"] == DENSE).all()


@pytest.mark.parametrize("kind", ["npz", "zarr", pytest.param("nc", marks=pytest.mark.slow), "h5"])
def test_patterns_of_other_formats(data_prep, kind):
    import netCDF4
    import zarr

    match kind:
        case "npz":
            np.savez("o.npz", **{f"x_{i}": EEG[i] for i in range(COUNT)}, y=np.arange(COUNT))
        case "zarr":
            store = zarr.open_group("o.zarr", mode="w")
            for i in range(COUNT):
                store.create_array(f"x_{i}", data=EEG[i])
        case "nc":
            with netCDF4.Dataset("o.nc", "w") as file:
                file.createDimension("c", 4)
                file.createDimension("t", 16)
                for i in range(COUNT):
                    file.createVariable(f"x_{i}", "f4", ("c", "t"))[:] = EEG[i]
        case "h5":
            with h5py.File("o.h5", "w") as file:
                for i in range(COUNT):
                    file[f"x_{i}"] = EEG[i]
                    file[f"z/{i}"] = np.float64(i)
                    file[f"link_{i}"] = h5py.SoftLink(f"/z/{i}")
    args = ["--field", f"x=o.{kind}:x_*"]
    args += ["--field", "y=o.h5:link_*"] if kind == "h5" else []
    code, _, err = data_prep("arrays", "OUT", *args)
    assert (code, said(err)) == (0, [])
    assert (read_back.rows()["x"] == EEG).all()
    if kind == "h5":
        assert read_back.rows()["y"].tolist() == list(range(COUNT))
    err = data_prep("arrays", "O2", "--field", f"x=o.{kind}")[2]
    assert "24 arrays at /x_*, which look like a group per sample" in err
    err = data_prep("arrays", "O2", "--field", f"x=o.{kind}:x_3")[2]
    assert "has 4 rows, each of which would be a sample; the file has 24 arrays at /x_*" in err
