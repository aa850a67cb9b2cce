import json

import numpy as np
import pytest

from hpctrain.data.index import Index
from hpctrain.data.reader import Reader

COUNT = 1000


@pytest.fixture
def files(tmp_path, monkeypatch):
    """NumPy files in the current folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.save("x.npy", rng.normal(size=(COUNT, 3, 2)).astype(np.float32))
    np.save("y.npy", np.arange(COUNT))
    np.save("flag.npy", np.arange(COUNT) % 3 == 0)
    np.save("big.npy", np.arange(COUNT).astype(">i4"))
    np.save("fortran.npy", np.asfortranarray(rng.normal(size=(COUNT, 5))))
    np.savez("more.npz", u=np.ones((COUNT, 2)), v=np.zeros(COUNT, np.uint16))
    np.save("short.npy", np.zeros(5))
    np.save("scalar.npy", np.array(3))
    np.save("empty.npy", np.zeros((0, 3)))
    np.save("complex.npy", np.zeros(COUNT, complex))
    np.save("unsigned.npy", np.zeros(COUNT, np.uint64))
    np.save("object.npy", np.array([{}] * COUNT, dtype=object), allow_pickle=True)
    np.savez("object.npz", o=np.array([{}] * COUNT, dtype=object))
    np.save("mask.npy", np.zeros(COUNT))
    np.save("no points.npy", np.zeros((COUNT, 0)))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:500])
    (tmp_path / "nothing.npy").write_bytes(b"")
    for name in ("text.npy", "text.npz", "table.csv"):
        (tmp_path / name).write_text("hello")
    return tmp_path


def test_fields_come_from_the_files(files, data_prep):
    code, out, err = data_prep(
        *("arrays", "x.npy", "big.npy", "flag.npy", "fortran.npy", "more.npz", "OUT"),
        *("--field", "label=y.npy", "--shard-size", "50KB"),
    )
    assert (code, err) == (0, "")
    assert "1000 samples (train 1000) in 2 shards" in out
    reader = Reader(files / "OUT", "train")
    assert [f"{name} {field}" for name, field in reader.fields.items()] == [
        "x float32[3, 2]",
        "big int32",
        "flag uint8",
        "fortran float64[5]",
        "u float64[2]",
        "v uint16",
        "label int64",
    ]
    rows = reader.read(np.arange(COUNT))
    for field, file in {"x": "x", "big": "big", "flag": "flag", "fortran": "fortran"}.items():
        assert (rows[field] == np.load(f"{file}.npy")).all()
    assert (rows["label"] == np.arange(COUNT)).all()
    source = Index.load(files / "OUT").provenance["source"]
    assert source["files"]["u"] == f"{files}/more.npz[u]"


def test_a_split_is_by_the_number_of_the_sample(files, data_prep):
    def split(out, spec, *more):
        assert data_prep("arrays", "y.npy", out, "--split", spec, *more)[0] == 0
        return {
            name: set(Reader(files / out, name).read(np.arange(n))["y"].tolist())
            for name, n in ((s, Index.load(files / out).split(s).count) for s in ("train", "val"))
        }

    first = split("a", "train=0.9,val=0.1")
    assert first["train"] | first["val"] == set(range(COUNT))
    assert not first["train"] & first["val"]
    assert 60 < len(first["val"]) < 140
    assert split("b", "train=0.9,val=0.1", "--shard-size", "1KB") == first
    np.save("y.npy", np.arange(2 * COUNT))  # more data: nothing moves
    longer = split("c", "train=0.9,val=0.1")
    assert first["train"] <= longer["train"]
    assert first["val"] <= longer["val"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nope.npy"], 3, "nope.npy cannot be read: No such file"),
        (["x.npy", "short.npy"], 3, "x.npy has 1000 samples, short.npy has 5"),
        (["scalar.npy"], 3, "scalar.npy is a single number"),
        (["empty.npy"], 3, "empty.npy has no samples"),
        (["no points.npy"], 3, "no points.npy: shape [0] has no elements"),
        (["complex.npy"], 3, "complex.npy: dtype complex128 is not supported; al"),
        (["unsigned.npy"], 3, "dtype uint64 is not supported"),
        (["object.npy"], 3, "object.npy holds Python objects (dtype object)"),
        (["object.npz"], 3, "object.npz holds Python objects (dtype object)"),
        (["cut.npy"], 3, "cut.npy is not a readable NumPy file"),
        (["nothing.npy"], 3, "nothing.npy is not a readable NumPy file"),
        (["text.npy"], 3, "text.npy holds Python objects (dtype object) or is not a NumPy file"),
        (["text.npz"], 3, "text.npz holds Python objects (dtype object) or is not a NumPy file"),
        (["table.csv"], 3, "table.csv: arrays reads .npy and .npz files"),
        (["mask.npy"], 3, "a field cannot be named 'mask'"),
        ([], 2, "give at least one .npy or .npz file"),
        (["x.npy", "--field", "x=y.npy"], 2, "x.npy and y.npy would both be the field 'x'"),
        (["--field", "x"], 2, "--field 'x' is not NAME=FILE.npy"),
        (["x.npy", "--split", "train"], 2, "'train' is not NAME=FRACTION"),
        (["x.npy", "--split", "train=0.5"], 2, "the fractions add up to 0.5, not 1"),
        (["x.npy", "--split", "a=0.5,a=0.5"], 2, "'a=0.5': each name once"),
        (["x.npy", "--split", "a=-1,b=2"], 2, "'a=-1': each name once, with a fraction above 0"),
        (["x.npy", "--split", "../a=1"], 2, "'../a=1' is not NAME=FRACTION"),
        (["x.npy", "--split", "a=nan"], 2, "'a=nan': each name once"),
        (["x.npy", "--shard-size", "12"], 2, "--shard-size '12': give the bytes"),
        (["x.npy", "--shard-size", "0MB"], 2, "--shard-size '0MB'"),
        (["x.npy", "--shard-size", "5 parsecs"], 2, "KB, MB, GB, KiB, MiB, GiB"),
    ],
)
def test_bad_input(files, data_prep, args, code, words):
    names = [arg for arg in args if not arg.startswith("--")]
    at = args.index(next((a for a in args if a.startswith("--")), None)) if names != args else None
    args = [*args[:at], "OUT", *args[at:]] if at is not None else [*args, "OUT"]
    found, out, err = data_prep("arrays", *args)
    assert words in err
    assert (found, out) == (code, "")
    assert err.startswith("data_prep: ")
    assert err.count("\n") == 1
    assert not (files / "OUT").exists() or not list((files / "OUT").iterdir())


def test_unknown_options_are_usage(data_prep):
    code, _, err = data_prep("arrays", "--shards", "3", "OUT")
    assert code == 2
    assert "usage:" in err


def test_more_than_one_batch_of_a_mapped_file(files, data_prep):
    big = np.lib.format.open_memmap("large.npy", "w+", np.float32, (300, 100, 1000))
    big[:] = np.arange(300, dtype=np.float32)[:, None, None]
    big.flush()
    code, out, _ = data_prep("arrays", "large.npy", "OUT", "--shard-size", "40MB")
    assert code == 0
    assert "in 3 shards, 120.1 MB" in out
    reader = Reader(files / "OUT", "train")
    rows = reader.read(np.array([299, 0, 150]))["large"]
    assert (rows[:, 0, 0] == [299, 0, 150]).all()
    assert (rows == rows[:, :1, :1]).all()


def test_inspect(files, data_prep):
    data_prep(
        *("arrays", "x.npy", "y.npy", "OUT", "--split", "train=0.9,val=0.1"),
        *("--shard-size", "1KB"),
    )
    index = Index.load(files / "OUT")
    code, out, err = data_prep("inspect", "OUT")
    assert (code, err) == (0, "")
    for words in (index.digest, "float32[3, 2]", "val-00000.h5", "more", "arrays x.npy y.npy OUT"):
        assert words in out
    code, out, err = data_prep("inspect", "OUT", "--json")
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert content["digest"] == index.digest
    assert content["splits"] == {name: index.split(name).count for name in ("train", "val")}
    assert content["problem"] is None
    assert len(content["shards"]) == len(index.shards)


def test_inspect_names_a_problem(files, data_prep):
    assert data_prep("inspect", "nowhere")[::2] == (
        3,
        "data_prep: the data folder nowhere does not exist\n",
    )
    data_prep("arrays", "y.npy", "OUT")
    (files / "OUT" / "train-00000.h5").unlink()
    code, out, err = data_prep("inspect", "OUT", "--json")
    assert code == 3
    assert "shard OUT/train-00000.h5 is missing" in err
    assert "is missing" in json.loads(out)["problem"]
