"""`data_prep litdata` converts the folders that litdata's `optimize` writes."""

import io
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from tests.data_prep import read_back

LEAF = {"type": None, "context": None, "children_spec": []}


def tree(*names, kind="builtins.dict"):
    node = {"type": kind, "context": json.dumps(names), "children_spec": [LEAF] * len(names)}
    return json.dumps([1, node])


def chunk(*samples):
    """Return a chunk of litdata with one leaf in each sample."""
    items = [struct.pack("<I", len(sample)) + sample for sample in samples]
    head = 4 * (len(items) + 2)
    ends = np.cumsum([head, *map(len, items)]).astype("<u4")
    return struct.pack("<I", len(items)) + ends.tobytes() + b"".join(items)


def write(folder, *, formats=("int",), spec=None, entry=None, content=None, **config):
    """Write a folder of one chunk as litdata does, without litdata."""
    samples = [struct.pack("<q", i) for i in range(3)]
    content = chunk(*samples) if content is None else content
    entry = {
        "chunk_bytes": len(content),
        "chunk_size": 3,
        "dim": None,
        "filename": "chunk-0-0.bin",
    } | (entry or {})
    names = [f"x{i}" for i in range(len(formats))]
    config = {
        "compression": None,
        "data_format": list(formats),
        "data_spec": spec or tree(*names),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    } | config
    Path(folder).mkdir(parents=True)
    Path(folder, "chunk-0-0.bin").write_bytes(content)
    Path(folder, "index.json").write_text(json.dumps({"chunks": [entry], "config": config}))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("index", "args", "code", "words"),
    [
        ({"formats": ("int", "pickle")}, [], 2, "'x1' of the samples is stored as pickle: pickles"),
        ({"formats": ("x:pickle",)}, [], 2, "'x0' of the samples is stored as x:pickle: pickles"),
        ({"formats": ("graph",)}, [], 2, "'x0' of the samples is stored as graph: pickles"),
        ({"formats": ("video:mp4",)}, [], 2, "is stored as video:mp4, which no field can hold"),
        ({"spec": tree("a", kind="collections.defaultdict")}, [], 3, "'collections.defaultdict'"),
        ({"spec": tree("a", "b")}, [], 3, "in/index.json is no index of litdata: its data_spec"),
        ({"formats": ("int", "int"), "spec": tree("a")}, [], 3, "data_spec has too few leaves"),
        ({"spec": tree("a b")}, [], 3, "field 'a b': a name has letters"),
        ({"encryption": {"algorithm": "fernet"}}, [], 2, "in/index.json: the chunks are encrypted"),
        ({"item_loader": "TokensLoader"}, [], 2, "the chunks are for litdata's TokensLoader"),
        ({"entry": {"dim": 8}}, [], 2, "the chunks are for litdata's TokensLoader"),
        ({"compression": "lz4"}, [], 2, "the chunks are compressed by lz4; zstd is read"),
        ({"entry": {"filename": "../x"}}, [], 3, "the chunk '../x' leads out of the folder"),
        ({"entry": {"filename": "x.bin"}}, [], 3, "in/x.bin cannot be read: No such file"),
        ({"entry": {"chunk_size": 0}}, [], 3, "in has no samples"),
        ({}, ["--column", "z"], 2, "--column z: there are x0"),
        ({}, ["--column", "x0", "--column", "x0"], 2, "--column x0 is there twice"),
    ],
)
def test_what_is_refused_by_its_index(data_prep, index, args, code, words):
    write("in", **index)
    found, out, err = data_prep("litdata", "in", "OUT", *args)
    assert words in err
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert not Path("OUT").exists()


def test_a_folder_without_an_index(data_prep):
    Path("in").mkdir()
    code, _, err = data_prep("litdata", "in", "OUT")
    assert code == 3
    assert "in has no index.json, and no folder in it has: litdata has not written it" in err
    assert "nope has no index.json" in data_prep("litdata", "nope", "OUT")[2]
    for content in (b"", b"[]", b"{}", b'{"chunks": [], "config": {}}', b"\xff"):
        Path("in/index.json").write_bytes(content)
        assert "in/index.json is no index of litdata" in data_prep("litdata", "in", "OUT")[2]


def test_without_the_library(data_prep, monkeypatch):
    monkeypatch.setitem(sys.modules, "litdata", None)
    write("in")
    code, _, err = data_prep("litdata", "in", "OUT")
    assert code == 2
    assert "needs the library litdata" in err
    assert "pip install 'hpctrain[litdata]'" in err


# The following tests need litdata, but neither torchvision nor a network.


@pytest.fixture
def litdata():
    return pytest.importorskip("litdata", reason="litdata is not installed")


def sample(i):
    import torch
    from PIL import Image

    image = Image.fromarray(np.full((4, 6, 3), 40 * i, np.uint8))
    file = io.BytesIO()
    image.save(file, "JPEG")
    return {
        "n": i,
        "f": i / 3,
        "o": i % 2 == 0,
        "t": f"täxt {i}",
        "b": bytes(range(i + 1)),
        "a": np.full((2, 3), i, np.float32),
        "v": np.arange(i + 1),
        "w": torch.full((2, 2), i, dtype=torch.int16),
        "x": torch.arange(3) + i,
        "q": image,
        "j": Image.open(file),
        "s": {"z": -i, "l": [i, 2]},
    }


def text(i):
    return {"t": f"täxt {i}", "l": [i] * 3, "s": {"z": -i}}


def optimize(folder, samples, **options):
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_size=2, **options)
    for i, value in enumerate(samples):
        cache[i] = value
    cache.done()
    cache.merge()


def convert(*args):
    return main(["litdata", *map(str, args), "--workers", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("level", ["", "chunk", "batch", "sample"])
def test_every_type_in_stored_order(litdata, level):
    packed = {"compression": "zstd", "compression_level": level} if level else {}
    if level:
        pytest.importorskip("zstd", reason="zstd is not installed, which litdata needs")
    optimize("in", map(sample, range(5)), **packed)
    before = {path.name: path.read_bytes() for path in Path("in").iterdir()}
    assert convert("in", "OUT", "--variable", "v") == 0
    assert {path.name: path.read_bytes() for path in Path("in").iterdir()} == before
    rows = read_back.rows("OUT")
    assert {name: str(rows[name].dtype) for name in "nfoawxqj"} == {
        "n": "int64",
        "f": "float64",
        "o": "uint8",
        "a": "float32",
        "w": "int16",
        "x": "int64",
        "q": "uint8",
        "j": "uint8",
    }
    for i in range(5):
        given = sample(i)
        for name in "nfoawx":
            assert np.array_equal(rows[name][i], given[name])
        assert rows["v"][i].tolist() == list(range(i + 1))
        assert rows["t"][i].tobytes().decode() == given["t"]
        assert rows["b"][i].tobytes() == given["b"]
        assert (rows["s.z"][i], rows["s.l"][i].tolist()) == (-i, [i, 2])
        for name in "qj":
            assert rows[name].shape[1:] == (3, 4, 6)
            assert (rows[name][i] == 40 * i).all()


@pytest.mark.slow
def test_rows_of_text_splits_and_tuples(litdata):
    optimize("in/train", map(text, range(600)))
    optimize("in/val", map(text, range(600, 603)))
    assert convert("in", "OUT") == 0
    for split, numbers in (("train", range(600)), ("val", range(600, 603))):
        rows = read_back.rows("OUT", split)
        assert [t.tobytes().decode() for t in rows["t"]] == [f"täxt {i}" for i in numbers]
        assert rows["l"].tolist() == [[i] * 3 for i in numbers]
        assert rows["s.z"].tolist() == [-i for i in numbers]
    optimize("pairs", [(np.full((2, 2), i), i) for i in range(3)])
    assert convert("pairs", "PAIRS") == 0
    rows = read_back.rows("PAIRS")
    assert (rows["0"][:, 0, 0].tolist(), rows["1"].tolist()) == ([0, 1, 2], [0, 1, 2])


@pytest.mark.slow
def test_pickles_do_not_run(litdata, capsys):
    optimize("in", [{"n": i, "p": {1, 2}} for i in range(3)])
    assert convert("in", "OUT") == 2
    assert "'p' of the samples is stored as pickle" in capsys.readouterr().err
    evil = chunk(*[b"cos\nsystem\n(S'touch ran'\ntR."] * 3)
    write("evil", formats=("pickle",), content=evil)
    assert convert("evil", "OUT") == 2
    assert convert("in", "OUT", "--column", "n") == 0
    assert read_back.rows("OUT")["n"].tolist() == [0, 1, 2]
    assert not Path("ran").exists()


@pytest.mark.slow
def test_a_format_that_the_library_does_not_know(litdata, capsys):
    write("in", formats=("no_header_numpy:99",))
    assert convert("in", "OUT") == 2
    err = capsys.readouterr().err
    assert "in/chunk-0-0.bin: litdata" in err
    assert "formats: no_header_numpy:99" in err


@pytest.mark.slow
def test_any_damage_is_named(litdata, capsys):
    write("in")
    path = Path("in/chunk-0-0.bin")
    content = path.read_bytes()
    assert convert("in", "GOOD") == 0
    assert read_back.rows("GOOD")["x0"].tolist() == [0, 1, 2]
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        assert convert("in", "OUT") == 3
        assert "in/chunk-0-0.bin is damaged" in capsys.readouterr().err
    for place in range(len(content) - 3 * 12):  # the header
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert convert("in", "OUT") == 3
        assert "in/chunk-0-0.bin" in capsys.readouterr().err
    assert not Path("OUT").exists()


@pytest.mark.slow
def test_damaged_rows_do_not_end_the_process(litdata, capsys):
    optimize("in", map(text, range(2)))
    path = Path("in/chunk-0-0.bin")
    content = path.read_bytes()
    codes = set()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 128]) + content[place + 1 :])
        codes.add(code := convert("in", f"OUT{place}"))
        assert code == 0 or "in/chunk-0-0.bin" in capsys.readouterr().err
    assert codes == {0, 3}
