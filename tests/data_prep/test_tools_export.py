"""`data_prep export` writes a data set as Parquet or image files."""

import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.datasets.dataset import DataSet
from data_prep.exports.images import folder_names
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


def contents(samples):
    """Return the bytes of each image with its label."""
    labels = samples["label"].tolist()
    return [(x.tobytes(), label) for x, label in zip(samples["image"], labels, strict=True)]


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
    code, _, err = data_prep(*command)
    assert code == 3
    assert "--text 'text': sample 1 is not UTF-8" in err
    assert os.listdir(tmp_path) == ["set"]


def test_images_by_class(digits, tmp_path, data_prep):
    code, out, err = data_prep("export", digits, tmp_path / "out", "--to", "images", "--limit", 50)
    assert (code, err) == (0, "")
    assert out == f"{tmp_path}/out: 100 samples (train 50, val 50) as images\n"
    classes = (tmp_path / "out" / "classes.txt").read_text().split()
    assert classes == list("0123456789")
    for split in ("train", "val"):
        samples = read(digits, split, 50)
        files = sorted((tmp_path / "out" / split).glob("*/*.png"), key=lambda path: path.name)
        assert len(files) == 50
        for i, path in enumerate(files):
            assert path.name == f"{i:07d}.png"
            assert classes.index(path.parent.name) == samples["label"][i]
            with Image.open(path) as image:
                assert np.array_equal(np.asarray(image), samples["image"][i, 0])


@pytest.mark.parametrize("channels", [1, 3, 4, None])
def test_images_of_any_channels(tmp_path, data_prep, channels):
    shape = (6, 5, 7) if channels is None else (6, channels, 5, 7)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    write_shards(tmp_path / "set", [("train", {"image": images})])
    assert data_prep("export", tmp_path / "set", tmp_path / "out", "--to", "images")[0] == 0
    for i, image in enumerate(images):
        with Image.open(tmp_path / "out" / "train" / f"{i:07d}.png") as found:
            pixels = np.asarray(found)
        assert np.array_equal(
            pixels if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0), image.squeeze()
        )


def test_encoded_images_stay_as_they_are(tmp_path, data_prep):
    files = []
    for kind in ("JPEG", "PNG", "WEBP"):
        content = io.BytesIO()
        Image.new("RGB", (9, 7), (200, 30, 60)).save(content, kind)
        files.append(content.getvalue())
    batch = {
        "jpeg": [np.frombuffer(file, np.uint8) for file in files],
        "label": np.array([5, -1, 12]),
    }
    write_shards(tmp_path / "set", [("train", batch)])
    assert data_prep("export", tmp_path / "set", tmp_path / "out", "--to", "images")[0] == 0
    found = [
        (tmp_path / "out" / "train" / name).read_bytes()
        for name in ("05/0000000.jpg", "-1/0000001.png", "12/0000002.webp")
    ]
    assert found == files
    batch["jpeg"][1] = np.frombuffer(b"no image", np.uint8)
    write_shards(tmp_path / "bad", [("train", batch)])
    code, _, err = data_prep("export", tmp_path / "bad", tmp_path / "new", "--to", "images")
    assert code == 3
    assert "field 'jpeg': sample 1 is no image file" in err
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_images(everything, tmp_path, data_prep):
    command = ["export", everything, tmp_path / "out", "--to", "images"]
    code, _, err = data_prep(*command, "--field", "nan")
    assert (code, "no field holds images" in err) == (2, True)
    code, _, err = data_prep(*command, "--label", "nan")
    assert (code, "one whole number per sample; there are none" in err) == (2, True)
    images = np.zeros((2, 4, 4), np.uint8)
    write_shards(tmp_path / "two", [("train", {"a": images, "b": images})])
    code, _, err = data_prep("export", tmp_path / "two", tmp_path / "out", "--to", "images")
    assert (code, "--field NAME says which of a, b" in err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_names_of_folders_are_safe():
    names = [
        "cat",
        "../../etc",
        "Cat",
        "",
        ".hidden",
        "a/b",
        "a\\b",
        "x" * 500,
        "né\n",
        "..",
        "-rf",
    ]
    found = folder_names(range(len(names) + 1), names)
    assert len({name.casefold() for name in found.values()}) == len(names) + 1
    for name in found.values():
        assert name
        assert not set("/\\\n\0") & set(name)
        assert not name.startswith((".", "-"))
        assert len(name.encode()) <= 255
    assert found[0] == "cat"
    assert found[8] == "né_"
    assert found[11] == "11"
    assert list(folder_names([1, 20, 300], []).values()) == ["001", "020", "300"]


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
    for options in (["--split", "test"], ["--field", "x"], ["--label", "label"], ["--to", "npz"]):
        assert data_prep("export", digits, tmp_path / "new", "--to", "parquet", *options)[0] == 2
    assert data_prep("export", digits, tmp_path / "new")[0] == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["export", "SET", "OUT", "--to", "parquet"], "pyarrow"),
        (["export", "SET", "OUT", "--to", "images"], "PIL.Image"),
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


def test_names_come_back_from_parquet(tmp_path, data_prep):
    batch = {"label": np.array([1, 0, 1]), "x": np.ones(3, np.float32)}
    names = {"label": ["cat", "dog"]}
    write_shards(tmp_path / "set", [("train", batch)], categories=names)
    data_prep("export", tmp_path / "set", tmp_path / "out", "--to", "parquet")
    assert data_prep("table", tmp_path / "out" / "train.parquet", tmp_path / "back")[0] == 0
    index = Index.load(tmp_path / "back")
    assert index.fields == Index.load(tmp_path / "set").fields
    assert {name: list(known) for name, known in index.categories.items()} == names


def test_what_a_killed_export_left_is_removed(digits, tmp_path, data_prep):
    program = f"""
import os, signal
from data_prep.exports.parquet import Parquet
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


def test_images_and_back(digits, tmp_path, data_prep):
    assert data_prep("export", digits, tmp_path / "out", "--to", "images", "--quiet")[0] == 0
    for split in ("train", "val"):
        back = tmp_path / split
        options = ["--mode", "L", "--split", f"{split}=1", "--quiet"]
        assert data_prep("images", tmp_path / "out" / split, back, *options)[0] == 0
        # The files are sorted by class, so the samples come back in another order.
        given, found = contents(read(digits, split)), contents(read(back, split))
        assert given != found
        assert sorted(given) == sorted(found)


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
