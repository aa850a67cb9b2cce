"""`data_prep python` converts the samples that a function of the user yields."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.shards.index import Index
from tests.data_prep import read_back

CODE = """
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from beside import START

@dataclass
class Config:
    n: int

def samples(n, part=0, parts=1, boom=-1):
    for i in range(START + part, Config(n).n, parts):
        if i == boom:
            helper()
        yield {
            "x": np.full((2, 3), i, np.float32),
            "n": i,
            "r": i / 7,
            "ok": i % 2 == 0,
            "text": f"täxt {i}",
            "raw": bytes([i]),
            "seq": np.arange(i, dtype=np.int16),
        }

def helper():
    return 1 / 0

def split(n, bad=-1):
    for i in range(n):
        yield {"n": i, **({} if i == bad else {"split": "val" if i % 4 == 0 else "train"})}

def given(**args):
    yield {"ok": args == {"i": 3, "f": 0.5, "l": [1, 2], "t": "some text", "e": ""}}

def a_list(): return [{"n": i} for i in range(3)]
def nothing(): return None
def empty(): return []
def odd():
    return [{"n": 1}, {"n": 2.5}, {"m": 1}, 5, *({"n": n} for n in (2**63, 3.0, "x", None))]
def no_split(): return [{"n": 1, "split": 3}]
def bad_split(): return [{"n": 1, "split": "../x"}]
def numbered(): return [{3: 1}]
def zero(): return [{"n": np.zeros(0)}]
def scalar(): return [{"n": 3}]
class DataLoader(list): pass
def batches(): return DataLoader()
class Pairs: pass
PAIRS = [(1, 2.5), (3, 4.5)]
def pairs(): return PAIRS
def noisy(after=0):
    for i in range(20):
        yield {"x": np.random.rand(2) if i >= after else np.ones(2)}
def of_torch():
    import torch
    from PIL import Image
    data = torch.utils.data.TensorDataset(torch.full((5, 2), 0.5), torch.arange(5))
    for x, label in map(data.__getitem__, range(len(data))):
        yield {"x": x, "label": label, "image": Image.new("RGB", (4, 3), (1, 2, int(label)))}
"""
PLACES = ("            helper()", "    return 1 / 0")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("beside", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("mine.py").write_text(CODE)
    Path("beside.py").write_text("START = 0\n")


def test_samples(data_prep):
    args = ("mine.py:samples", "OUT", "--arg", "n=20", "--variable", "seq")
    code, out, err = data_prep("python", *args)
    assert (code, err) == (0, "")
    assert "20 samples (train 20) in 1 shard" in out
    assert [f"{name} {field}" for name, field in Index.load(Path("OUT")).fields.items()] == [
        *("x float32[2, 3]", "n int64", "r float64", "ok uint8", "text uint8[*]"),
        *("raw uint8[*]", "seq int16[*]"),
    ]
    rows = read_back.rows("OUT")
    assert (rows["x"] == np.arange(20)[:, None, None]).all()
    assert rows["n"].tolist() == list(range(20))
    assert rows["r"].tolist() == [i / 7 for i in range(20)]
    assert rows["ok"].tolist() == [1, 0] * 10
    assert [text.tobytes().decode() for text in rows["text"]] == [f"täxt {i}" for i in range(20)]
    assert [raw.tolist() for raw in rows["raw"]] == [[i] for i in range(20)]
    assert [seq.tolist() for seq in rows["seq"]] == [list(range(i)) for i in range(20)]
    assert "already holds this data set" in data_prep("python", *args)[1]


def test_pieces(data_prep):
    args = ("--arg", "n=20", "--variable", "seq", "--pieces", 3)
    for workers in (1, 2):
        out = f"O{workers}"
        assert data_prep("python", "mine.py:samples", out, *args, "--workers", workers)[0] == 0
    for path in Path("O1").glob("*.h5"):
        assert path.read_bytes() == Path("O2", path.name).read_bytes()
    order = [*range(0, 20, 3), *range(1, 20, 3), *range(2, 20, 3)]
    assert read_back.rows("O1")["n"].tolist() == order


def test_its_own_split(data_prep):
    assert data_prep("python", "mine.py:split", "OUT", "--arg", "n=8")[0] == 0
    assert read_back.rows("OUT", "val")["n"].tolist() == [0, 4]
    assert read_back.rows("OUT")["n"].tolist() == [1, 2, 3, 5, 6, 7]
    args = ("--arg", "n=8", "--split", "all=1")
    assert data_prep("python", "mine.py:split", "ALL", *args)[0] == 0
    assert read_back.rows("ALL", "all")["n"].tolist() == list(range(8))
    bad = ("python", "mine.py:split", "BAD", "--arg", "n=8", "--arg", "bad=5")
    assert "mine.py: sample 5: some samples have a 'split', some have none" in data_prep(*bad)[2]
    assert data_prep(*bad, "--on-error", "skip")[0] == 0
    assert read_back.rows("BAD")["n"].tolist() == [1, 2, 3, 6, 7]


def test_arguments_are_json_or_text(data_prep):
    values = ("i=3", "f=0.5", "l=[1, 2]", "t=some text", "e=")
    args = [word for value in values for word in ("--arg", value)]
    assert data_prep("python", "mine.py:given", "OUT", *args)[0] == 0
    assert read_back.rows("OUT")["ok"].tolist() == [1]


def test_what_does_not_fit_is_left_out_and_reported(data_prep):
    assert data_prep("python", "mine.py:odd", "OUT", "--on-error", "skip")[0] == 0
    assert read_back.rows("OUT")["n"].tolist() == [1, 3]
    problems = Path("OUT/problems.jsonl").read_text()
    for words in (
        "float64 2.5 cannot be stored as int64 exactly",
        "it has no 'n'; it has 'm', the first sample has not",
        "it is a int; a sample is a dict",
        "uint64 9223372036854775808 cannot be stored as int64 exactly",
        "found uint8[1], the field is int64",
        "NoneType is neither real numbers, text nor bytes",
    ):
        assert words in problems
    assert len(problems.splitlines()) == 6
    err = data_prep("python", "mine.py:odd", "STOP")[2]
    assert f"{os.getcwd()}/mine.py: sample 1: field 'n': float64 2.5" in err


def test_an_exception_comes_with_its_place(data_prep):
    args = ("--arg", "n=20", "--variable", "seq", "--arg", "boom=17", "--workers", 1)
    code, out, err = data_prep("python", "mine.py:samples", "OUT", *args)
    assert (code, out) == (3, "")
    lines = err.splitlines()
    assert lines[0].endswith(
        "mine.py: samples, sample 17 of part 0: ZeroDivisionError: division by zero"
    )
    number = CODE.splitlines().index
    for line, where, code in zip(lines[1:], ("samples", "helper"), PLACES, strict=True):
        assert line.endswith(f"mine.py, line {number(code) + 1}, in {where}: {code.strip()}")
    assert len(lines) == 3
    assert not Path("OUT/index.json").exists()


def test_tensors_and_images_of_pillow(data_prep):
    assert data_prep("python", "mine.py:of_torch", "OUT")[0] == 0
    assert read_back.fields() == {"x": "float32[2]", "label": "int64", "image": "uint8[3, 3, 4]"}
    rows = read_back.rows("OUT")
    assert (rows["x"] == 0.5).all()
    assert rows["label"].tolist() == rows["image"][:, 2, 0, 0].tolist() == list(range(5))


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["mine"], 2, "'mine' is not FILE.py:NAME"),
        (["nope.py:x"], 3, "nope.py cannot be read: No such file"),
        (["mine.py:nope"], 2, "has no function 'nope'; it has Config, samples, helper"),
        (["broken.py:x"], 3, "broken.py cannot be imported: "),
        (["mine.py:nothing"], 3, "nothing returns a NoneType, no samples one by one"),
        (["mine.py:Pairs"], 3, "a Pairs, no samples one by one; a function yields a dict for each"),
        (["mine.py:batches"], 3, "batches gives batches; yield the samples of its data set"),
        (["mine.py:empty"], 3, "mine.py:empty yields no sample"),
        (["mine.py:no_split"], 3, "sample 0: its 'split' is 3, no name"),
        (["mine.py:bad_split"], 3, "sample 0: split '../x': a name has letters"),
        (["mine.py:numbered"], 3, "sample 0: the field 3 has no text for a name"),
        (["mine.py:zero"], 3, "field 'n': shape [0] has no elements"),
        (["mine.py:scalar", "--variable", "n"], 3, "a single number has no length"),
        (["mine.py:scalar", "--variable", "m"], 2, "--variable m: the fields are n"),
        (["mine.py:split", "--arg", "n=2", "--pieces", "2"], 2, "split has no parameters part"),
        (["mine.py:pairs"], 3, "sample 0: it is a tuple; a sample is a dict of fields"),
        (["mine.py:PAIRS"], 2, "has no function 'PAIRS'"),
        (["mine:samples"], 2, "'mine:samples' is not FILE.py:NAME"),
        (["mine.py:noisy"], 3, "sample 0: it is another one when it is asked"),
        (["mine.py:noisy", "--arg", "after=5"], 3, "sample 5: it is another one when it is asked"),
        (["mine.py:samples", "--pieces", "0"], 2, "--pieces 0: at least 1"),
        (["mine.py:samples"], 2, "missing a required argument: 'n'; see --arg"),
        (["mine.py:samples", "--arg", "n=3", "--arg", "part=1"], 2, "multiple values for keyword"),
        (["mine.py:samples", "--arg", "n"], 2, "--arg 'n' is not NAME=VALUE"),
        (["mine.py:samples", "--arg", "n=1", "--arg", "n=2"], 2, "each name once"),
        (["mine.py:scalar", "--split", "column:x"], 2, "has no such column to go by"),
    ],
)
def test_what_cannot_be(data_prep, args, code, words):
    Path("broken.py").write_text("def x(:\n")
    found, out, err = data_prep("python", args[0], "OUT", *args[1:], "--workers", 1)
    assert words in err
    assert (found, out) == (code, "")
    assert not Path("OUT/index.json").exists()


@pytest.mark.parametrize("shape", [(5, 3, 2), (4, 5, 2), (4, 5, 6)])
def test_samples_of_other_shapes_are_refused(data_prep, shape):
    code = "import numpy as np\ndef f():\n  yield {'x': np.ones((4, 3, 2))}\n"
    Path("mine.py").write_text(f"{code}  yield {{'x': np.ones({shape})}}\n")
    words = f"found float64{list(shape)}, the field is float64[4, 3, 2]; --variable takes"
    data_prep.refuses(3, words, "python", "mine.py:f", "OUT")
    if shape[1:] == (3, 2):
        assert data_prep("python", "mine.py:f", "OUT", "--variable", "x")[0] == 0


def test_a_folder_of_hugging_face(data_prep):
    """The function of docs/data.md."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()
    read_back.function_of_the_page("hf.py")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 6, 5, 3), np.uint8)
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    saved = datasets.Dataset.from_dict(
        {"image": list(pixels), "label": [i % 2 for i in range(20)]}, datasets.Features(features)
    )
    parts = {"train": saved.select(range(12)), "test": saved.select(range(12, 20))}
    datasets.DatasetDict(parts).save_to_disk("in")
    assert data_prep("python", "hf.py:samples", "OUT", "--arg", "folder=in")[0] == 0
    assert (read_back.rows("OUT")["image"] == pixels[:12].transpose(0, 3, 1, 2)).all()
    assert read_back.rows("OUT", "test")["label"].tolist() == [0, 1] * 4


def test_a_folder_of_mosaicml_streaming(data_prep):
    """The function of docs/data.md, if the library is installed."""
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    read_back.function_of_the_page("mds.py")
    with streaming.MDSWriter(out="mds", columns={"label": "int", "image": "ndarray"}) as out:
        for i in range(20):
            out.write({"label": i, "image": np.full((2, 3), i, np.float32)})
    assert data_prep("python", "mds.py:samples", "OUT", "--arg", "folder=mds")[0] == 0
    assert read_back.rows("OUT")["label"].tolist() == list(range(20))
