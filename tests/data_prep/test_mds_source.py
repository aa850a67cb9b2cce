"""`data_prep mds` converts MDS folders.

mosaicml-streaming 0.10.0 wrote the content of mds.zip from the samples that `sample` returns.
"""

import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from hpctrain.data.sources.images import decode
from tests.data_prep import read_back

COLUMNS = {
    "n": "int",
    "u": "uint16",
    "f": "float32",
    "t": "str",
    "b": "bytes",
    "a": "ndarray:float32:2,3",
    "s": "ndarray:int64",
    "d": "ndarray",
    "j": "jpeg",
    "p": "png",
    "q": "pil",
    "si": "str_int",
    "sf": "str_float",
    "m": "json",
}
TAKEN = [name for name in COLUMNS if name != "m"] + ["m:k", "m:l"]


def sample(i):
    from PIL import Image

    image = Image.fromarray(np.full((4, 6, 3), 40 * i, np.uint8))
    return {
        "n": i,
        "u": np.uint16(i),
        "f": np.float32(i / 3),
        "t": f"täxt {i}",
        "b": bytes(range(i + 1)),
        "a": np.full((2, 3), i, np.float32),
        "s": np.arange(i + 1),
        "d": np.arange(4, dtype=np.int16) + i,
        **dict.fromkeys("jpq", image),
        "si": i * 3,
        "sf": i / 7,
        "m": {"k": i, "l": [1, 2]},
    }


def options(*names):
    return [word for name in names for word in ("--column", name)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    with zipfile.ZipFile(Path(__file__).with_name("mds.zip")) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(rows, ids):
    assert [str(rows[name].dtype) for name in ("n", "u", "f", "a", "d", "si", "sf", "k", "l")] == [
        *("int64", "uint16", "float32", "float32", "int16", "int64", "float64", "int64", "int64")
    ]
    for place, i in enumerate(ids):
        given = sample(i)
        for name in ("n", "u", "f", "a", "d", "si", "sf"):
            assert np.array_equal(rows[name][place], given[name])
        assert (rows["k"][place], rows["l"][place].tolist()) == (i, [1, 2])
        assert rows["s"][place].tolist() == list(range(i + 1))
        assert rows["t"][place].tobytes().decode() == given["t"]
        assert rows["b"][place].tobytes() == given["b"]
        for name in "jpq":
            assert rows[name].shape[1:] == (3, 4, 6)
            assert (rows[name][place] == 40 * i).all()


@pytest.mark.parametrize("compression", ["raw", "gz", "bz2", "zstd"])
def test_every_column(folder, data_prep, compression):
    args = ("mds", compression, "OUT", *options(*TAKEN), "--variable", "s", "--workers", 1)
    code, out, err = data_prep(*args)
    assert (code, err) == (0, "")
    assert "6 samples (train 5, val 1) in 3 shards" in out
    check(read_back.rows("OUT"), range(5))
    check(read_back.rows("OUT", "val"), [5])


def test_fractions_instead_of_folders_and_one_folder(folder, data_prep):
    args = ("--split", "a=0.5,b=0.5", "--workers", 1)
    assert data_prep("mds", "raw", "OUT", *options("n"), *args)[0] == 0
    found = [read_back.rows("OUT", split)["n"].tolist() for split in "ab"]
    assert sorted(found[0] + found[1]) == list(range(6))
    assert data_prep("mds", "raw/train", "ONE", *options("n"), "--workers", 1)[0] == 0
    assert read_back.rows("ONE")["n"].tolist() == list(range(5))


@pytest.mark.parametrize("column", ["j", "p", "q"])
def test_images_stay_encoded(folder, data_prep, column):
    assert data_prep("mds", "raw", "OUT", *options(column), "--encoded", "--workers", 1)[0] == 0
    assert (decode(read_back.rows("OUT")[column])[:, 0, 0, 0] == np.arange(5) * 40).all()


@pytest.mark.parametrize(
    ("source", "args", "code", "words"),
    [
        ("raw", [], 2, "column 'm' holds JSON: --column m:KEY takes a key"),
        ("raw", options("nope"), 2, "--column nope: there are a, b, d, f, j, m, n, p, q"),
        ("raw", options("n:k"), 2, "--column n:k: the column is int, which has no keys"),
        ("raw", options("n", "n"), 2, "the field 'n' is there twice"),
        ("raw", options("m:zz"), 3, "sample 0: column 'm': there is no key 'zz'"),
        ("raw", [*options("n"), "--variable", "s"], 2, "--variable s: the fields are n"),
        ("raw", options("s"), 3, "found int64[2], the field is int64[1]; --variable takes"),
        ("raw", [*options("q"), "--max-pixels", "9"], 3, "it has 4 x 6 pixels; --max-pixels is 9"),
        ("raw", [*options("p"), "--max-pixels", "9"], 3, "says 4 x 6 pixels; --max-pixels is 9"),
        ("br", [], 3, "shard.00000.mds.br is compressed by 'br'; gz, bz2 and zstd are read"),
        ("pkl", [], 2, "column 'e' is str_decimal, which no field can hold"),
        ("pkl", options("x"), 2, "column 'x' holds pickles, which run code"),
        ("pkl", options("z"), 2, "column 'z' is uint64, which no field can hold"),
        (".", options("n"), 3, "pkl/shard.00000.mds has other columns than br/shard"),
        ("nope", [], 3, "nope has no index.json"),
        ("raw", [*options("n"), "--split", "column:x"], 2, "it has folder"),
    ],
)
def test_what_cannot_be(folder, data_prep, source, args, code, words):
    assert words in data_prep.refused("mds", source, "OUT", *args, "--workers", 1, code=code)
    assert not Path("OUT/index.json").exists()


def change(path, **changes):
    content = json.loads(Path(path).read_text())
    content["shards"][0].update(changes)
    Path(path).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "raw/train/index.json is no index of MDS"),
        (b"[]", "is no index of MDS"),
        (b'{"shards": [{}]}', "the key 'format' is missing"),
        (b'{"shards": []}', "has no samples"),
    ],
)
def test_a_damaged_index(folder, data_prep, content, words):
    Path("raw/train/index.json").write_bytes(content)
    assert words in data_prep("mds", "raw/train", "OUT", *options("n"))[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "csv"}, "a shard has the format 'csv', version 2"),
        ({"version": 1}, "version 1; mds of version 2 is read"),
        ({"samples": 7}, "is damaged: index.json lists 7 samples"),
        ({"samples": 2**40}, "is damaged: index.json lists 1099511627776 samples"),
        ({"raw_data": {"basename": "../x", "bytes": 1}}, "'../x' leads out of the folder"),
        ({"raw_data": {"basename": "x", "bytes": 1}}, "raw/train/x cannot be read: No such"),
        ({"column_sizes": []}, "is no index of MDS"),
        ({"column_encodings": ["int"] * 14}, "shard.00001.mds has other columns than"),
    ],
)
def test_an_index_that_lies(folder, data_prep, changes, words):
    change("raw/train/index.json", **changes)
    assert words in data_prep.refused("mds", "raw/train", "OUT", *options("n", "a"), "--workers", 1)


@pytest.mark.parametrize("compression", ["raw", "gz", "bz2", "zstd"])
@pytest.mark.parametrize("cut", [0, 3, 40, 0.5, -1])
def test_a_shard_that_is_cut_off(folder, data_prep, compression, cut):
    path = min(Path(compression, "train").glob("*.mds*"))
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content)) if 0 < cut < 1 else cut])
    err = data_prep.refused("mds", compression, "OUT", *options("n"), "--workers", 1)
    assert f"{path} is damaged" in err


def test_any_damage_is_named(folder, data_prep):
    path = min(Path("raw/train").glob("*.mds"))
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for i in range(6):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 3):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        out = f"O{i}"
        args = ("mds", "raw", out, *options(*TAKEN), "--variable", "s", "--workers", 1)
        code, _, err = data_prep(*args, "--on-error", "skip")
        assert code in (0, 3), err
        assert "Traceback" not in err


@pytest.mark.slow
def test_the_library_writes_what_we_read(tmp_path, monkeypatch):
    """This test needs mosaicml-streaming, but no working torchvision."""
    monkeypatch.setitem(sys.modules, "streaming.vision", type(sys)("streaming.vision"))
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    with streaming.MDSWriter(out=str(tmp_path / "in"), columns=COLUMNS, size_limit=4000) as writer:
        for i in range(6):
            writer.write(sample(i))
    args = [*options(*TAKEN), "--variable", "s", "--workers", "1"]
    assert main(["mds", str(tmp_path / "in"), str(tmp_path / "out"), *args]) == 0
    check(read_back.rows(tmp_path / "out"), range(6))
