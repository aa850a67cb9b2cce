"""Files with a group per sample, matrices that are refused, and text that names the splits."""

import os

import h5py
import numpy as np
import pytest

from hpctrain.data.shards.index import Index
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


def test_each_group_is_a_sample(recordings, data_prep):
    fields = {
        "eeg": "/rec_*/eeg",
        "events": "rec_*/events",
        "age": "/*/age",
        "name": "/rec_*/name",
        "label": "/rec_*@label",
        "rate": "/rec_*/eeg@rate",
    }
    args = ("arrays", "OUT", *field(**fields), "--shard-size", "2KB")
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


def test_an_index_has_no_patterns(recordings, data_prep):
    code, _, err = data_prep("index", "rec.h5", "--field", "x=/rec_*/eeg")
    assert code == 3
    assert f"`python -m data_prep arrays OUT --field 'NAME={os.getcwd()}/rec.h5:/rec_*/eeg'`" in err


@pytest.mark.parametrize("command", ["arrays", "index"])
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("images", "is of MATLAB, whose axes are reversed in HDF5"),
        ("s/x", "is of MATLAB, whose axes are reversed in HDF5"),
        ("of_matlab/data", "mat73"),
        ("X", "is a sparse matrix, or a part of one"),
        ("X/data", "anndata or scipy"),
        ("obs", "is a group"),
    ],
)
def test_what_is_of_matlab_or_sparse_is_refused(data_prep, command, key, words):
    with h5py.File("m.h5", "w", userblock_size=512) as file:
        for name in ("images", "s/x"):
            file[name] = np.zeros((4, 3))
            file[name].attrs["MATLAB_class"] = np.bytes_("double")
        file["of_matlab/data"] = np.zeros(4)
        file["of_matlab"].attrs["MATLAB_class"] = np.bytes_("double")
        for name in ("X/data", "X/indices", "X/indptr", "obs/data"):
            file[name] = np.arange(4)
    args = ("OUT", "--field", f"x=m.h5:/{key}") if command == "arrays" else ()
    data_prep.refuses(3, words, command, *(args or ("m.h5", "--field", f"x=/{key}")))


def test_sparse_matrices_of_scipy_are_refused(data_prep):
    from scipy import sparse

    matrix = sparse.csr_matrix(np.eye(3))
    sparse.save_npz("s.npz", matrix)
    data_prep.refuses(3, "s.npz is a sparse matrix of SciPy", "arrays", "s.npz", "OUT")
