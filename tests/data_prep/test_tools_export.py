"""`data_prep export` writes a data set as Parquet."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.datasets.dataset import DataSet
from hpctrain.shards.field import DTYPES
from hpctrain.shards.format import write_shards
from hpctrain.shards.index import Index


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    from data_prep.cli import main

    folder = tmp_path_factory.mktemp("digits")
    assert main(["sample", "digits", str(folder / "set"), "--quiet", "--shard-size", "30KB"]) == 0
    return folder / "set"


@pytest.fixture
def everything(tmp_path):
    """Return the folder of a data set with several shards and fields of all dtypes and kinds."""
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 100, (40, 2, 3)).astype(name) for name in DTYPES}
    batch["nan"] = np.where(rng.random(40) < 0.5, np.nan, rng.normal(size=40))
    batch["text"] = [np.frombuffer("aä€"[: i % 4].encode(), np.uint8) for i in range(40)]
    batch["boxes"] = [rng.normal(size=(i % 5, 4)).astype(np.float32) for i in range(40)]
    write_shards(tmp_path / "set", [("train", batch), ("val", batch)], max_bytes=4000)
    assert len(Index.load(tmp_path / "set").shards) > 4
    return tmp_path / "set"


def read(folder, split, limit=None):
    """Return the samples by field; a variable-length field is a list of arrays."""
    data = DataSet(folder)
    found = {name: [] for name in data.index.fields}
    for rows in data.blocks(data.index.split(split), data.index.fields, limit):
        for name, value in rows.items():
            found[name] += list(value)
    return {
        name: found[name] if field.variable else np.array(found[name], field.dtype)
        for name, field in data.index.fields.items()
    }


def same(a, b):
    assert set(a) == set(b)
    for name in a:
        assert len(a[name]) == len(b[name])
        for x, y in zip(a[name], b[name], strict=True):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def test_parquet_and_back(everything, tmp_path, data_prep):
    code, _, err = data_prep("export", everything, tmp_path / "out", "--to", "parquet")
    assert (code, err) == (0, "")
    assert sorted(os.listdir(tmp_path / "out")) == ["train.parquet", "val.parquet"]
    table = pq.read_table(tmp_path / "out" / "train.parquet")
    assert table.schema.metadata[b"hpctrain"].decode() == Index.load(everything).digest
    found = {}
    for column in table.schema:
        shape = json.loads(column.metadata[b"shape"])
        values = table[column.name].combine_chunks()
        if pa.types.is_large_list(column.type):
            dtype = Index.load(everything).fields[column.name].dtype
            rows = [np.array(row.as_py(), dtype).reshape(-1, *shape) for row in values]
            found[column.name] = rows
        elif shape:
            assert column.type.shape == shape
            flat = values.storage.flatten().to_numpy(zero_copy_only=False)
            found[column.name] = flat.reshape(-1, *shape)
        else:
            found[column.name] = values.to_numpy()
    same(found, read(everything, "train"))
    files = [tmp_path / "out" / f"{split}.parquet" for split in ("train", "val")]
    split = ("--split", "file:train=train.*,val=val.*")
    assert data_prep("table", *files, tmp_path / "back", *split)[0] == 0
    assert Index.load(tmp_path / "back").fields == Index.load(everything).fields
    for name in ("train", "val"):
        same(read(tmp_path / "back", name), read(everything, name))


def test_parquet_with_text(everything, tmp_path, data_prep):
    command = ["export", everything, tmp_path / "out", "--to", "parquet"]
    assert data_prep(*command, "--text", "text")[0] == 0
    table = pq.read_table(tmp_path / "out" / "train.parquet")
    expected = [sample.tobytes().decode() for sample in read(everything, "train")["text"]]
    assert table["text"].to_pylist() == expected
    code, _, err = data_prep(*command[:2], tmp_path / "b", *command[3:], "--text", "boxes")
    assert code == 2
    assert "--text 'boxes': it is a field uint8[*]; there are text" in err
    assert not (tmp_path / "b").exists()


def test_bytes_that_are_no_text(tmp_path, data_prep):
    texts = [np.frombuffer(text, np.uint8) for text in (b"a", b"\xc3", b"\xa4", b"b")]
    write_shards(tmp_path / "set", [("train", {"text": texts})])
    command = ["export", tmp_path / "set", tmp_path / "out", "--to", "parquet", "--text", "text"]
    data_prep.refuses(3, "--text 'text': sample 1 is not UTF-8", *command)
    assert os.listdir(tmp_path) == ["set"]


def test_out_that_cannot_be(digits, tmp_path, data_prep):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for out, code, why in (
        ("full", 3, "is not empty"),
        ("file", 3, "is a file"),
        ("file/below", 3, "lies in one"),
        (digits / "out", 2, "lies in the data set's own folder"),
    ):
        found, _, err = data_prep("export", digits, tmp_path / out, "--to", "parquet")
        assert (found, why in err) == (code, True), err
    assert data_prep("export", digits, tmp_path / "empty", "--to", "parquet")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "full"]
    for options in (["--split", "test"], ["--field", "x"], ["--to", "npz"], ["--to", "images"]):
        assert data_prep("export", digits, tmp_path / "new", "--to", "parquet", *options)[0] == 2
    assert "numpy.savez writes" in data_prep("export", digits, tmp_path / "new", "--to", "npz")[2]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["export", "SET", "OUT", "--to", "parquet"], "pyarrow"),
        (["stats", "SET", "--plot", "OUT.png"], "matplotlib"),
    ],
)
def test_libraries_that_are_missing(digits, tmp_path, data_prep, monkeypatch, command, module):
    monkeypatch.setitem(sys.modules, module, None)  # the import now fails, as without the package
    words = {"SET": digits, "OUT": tmp_path / "out", "OUT.png": tmp_path / "out.png"}
    code, out, err = data_prep(*[words.get(word, word) for word in command])
    assert (code, out) == (2, "")
    assert "is not installed: pip install 'hpctrain[prep]'" in err
    assert not os.listdir(tmp_path)


def test_looking_needs_no_torch():
    tools = "verify, stats, inspect, head, export"
    check = "assert not {'torch', 'matplotlib', 'pyarrow', 'PIL', 'rich'} & set(sys.modules)"
    program = f"import sys; from data_prep.tools import {tools}; {check}"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_damaged_data_set_leaves_nothing(everything, tmp_path, data_prep):
    (everything / "val-00000.h5").write_bytes(b"")
    code, _, err = data_prep("export", everything, tmp_path / "out", "--to", "parquet")
    assert (code, "val-00000.h5 is truncated" in err) == (3, True)
    assert os.listdir(tmp_path) == ["set"]


def test_what_a_killed_export_left_is_removed(digits, tmp_path, data_prep):
    program = f"""
import os, signal
from data_prep.tools.export import Parquet
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
Parquet.write = lambda self, folder, *_: ((folder / "x").touch(), die())
from data_prep.cli import main
main(["export", {str(digits)!r}, {str(tmp_path / "out")!r}, "--to", "parquet"])
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".out.")
    assert data_prep("export", digits, tmp_path / "out", "--to", "parquet")[0] == 0
    assert os.listdir(tmp_path) == ["out"]


def test_text_and_back(everything, tmp_path, data_prep):
    options = ["--to", "parquet", "--text", "text", "-f", "text", "-f", "nan", "-f", "boxes"]
    assert data_prep("export", everything, tmp_path / "out", *options)[0] == 0
    columns = ["--columns", "text,nan"]
    source = tmp_path / "out" / "train.parquet"
    code, _, err = data_prep("table", source, tmp_path / "back", *columns, "--quiet")
    assert (code, err) == (0, "")
    back = read(tmp_path / "back", "train")
    given = read(everything, "train")
    same({name: given[name] for name in back}, back)
