import json
import os
from dataclasses import replace

import numpy as np
import pytest

from data_prep.cli import main
from hpctrain.data.shards.field import Field, name_problem
from hpctrain.data.shards.index import Index, Shard
from hpctrain.errors import DataError
from tests.written import write_shards


@pytest.fixture
def folder(tmp_path):
    samples = {"x": np.arange(12, dtype=np.float32).reshape(6, 2), "label": np.arange(6)}
    text = [np.frombuffer(word, np.uint8) for word in (b"a", b"", b"ccc", b"d", b"e", b"ff")]
    batches = [("train", {**samples, "text": text}), ("val", {**samples, "text": text})]
    write_shards(tmp_path / "set", batches, max_bytes=80, provenance={"command": "a test"})
    return tmp_path / "set"


def edit(folder, change):
    """Apply `change` to the JSON of the index in `folder`."""
    path = folder / "index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_what_is_saved_is_loaded(folder):
    index = Index.load(folder)
    assert dict(index.fields) == {
        "x": Field("float32", (2,)),
        "label": Field("int64"),
        "text": Field("uint8", variable=True),
    }
    assert [str(field) for field in index.fields.values()] == ["float32[2]", "int64", "uint8[*]"]
    assert index.splits == ("train", "val")
    assert index.split("train").count == 6
    assert sum(shard.count for shard in index.split("train").shards) == 6
    assert len(index.split("val").shards) > 1
    assert index.provenance == {"command": "a test"}
    assert index.statistics["train"]["label"].mean == 2.5
    index.check(folder)


def test_the_file_has_the_documented_keys(folder):
    content = json.loads((folder / "index.json").read_text())
    assert list(content) == [
        *("format", "version", "digest", "fields", "shards", "statistics", "provenance")
    ]
    assert content["format"] == "hpctrain-shards"
    assert content["version"] == 1
    assert content["digest"].startswith("xxh3_128:")
    assert content["fields"]["text"] == {"dtype": "uint8", "shape": [], "variable": True}
    keys = {"path", "split", "count", "bytes", "digest", "elements"}
    assert set(content["shards"][0]) == keys
    statistics, keys = content["statistics"]["val"], {"mean", "std", "min", "max"}
    assert set(statistics["x"]) == {*keys, "nonfinite", "nan"}
    assert set(statistics["label"]) == {*keys, "nonfinite", "nan", "classes"}
    assert statistics["label"]["classes"] == {str(value): 1 for value in range(6)}
    assert set(statistics["text"]) == {*keys, "nonfinite", "nan", "lengths"}
    assert statistics["text"]["lengths"] == {
        "mean": 8 / 6,
        "std": pytest.approx((16 / 6 - (8 / 6) ** 2) ** 0.5),
        "min": 0,
        "max": 3,
        "total": 8,
    }


def test_categories(folder):
    index = Index.load(folder)
    assert "categories" not in json.loads((folder / "index.json").read_text())
    names = {"label": ("a", "b", "c")}
    named = replace(index, categories=names)
    assert named.digest != index.digest
    assert replace(index, categories={}).digest == index.digest
    named.save(folder)
    assert Index.load(folder) == named
    assert dict(Index.load(folder).categories) == names
    edit(folder, lambda content: content["categories"].update(label=["x"]))
    assert "does not fit" in refused(folder)
    edit(folder, lambda content: content["categories"].update(other=["x"]))
    assert "categories of 'other': there is no such field; there are x, label, text" in refused(
        folder
    )


def test_the_digest_of_a_data_set_does_not_change_with_our_versions():
    """Runs and staged copies store the digest, so no version of hpctrain may change it."""
    fields = {"x": Field("float32", (2,)), "t": Field("uint8", variable=True)}
    shards = (Shard("train-00000.h5", "train", 3, 4096, "xxh3_128:00"),)
    assert Index(fields, shards).digest == "xxh3_128:d390732ba0bda375a827a868495c4bfe"


def test_the_digest_names_the_data_and_nothing_else(folder, tmp_path):
    index = Index.load(folder)
    assert Index(index.fields, index.shards).digest == index.digest
    assert Index(index.fields, index.shards[1:]).digest != index.digest
    renamed = {"y" if name == "x" else name: field for name, field in index.fields.items()}
    assert Index(renamed, index.shards).digest != index.digest
    os.rename(folder, tmp_path / "elsewhere")
    assert Index.load(tmp_path / "elsewhere").digest == index.digest


def test_unknown_keys_are_ignored(folder):
    before = Index.load(folder)
    edit(folder, lambda content: content.update(later="thing"))
    edit(folder, lambda c: c["statistics"]["val"]["text"].update(later=1))
    edit(folder, lambda c: c["statistics"]["val"]["text"]["lengths"].update(later=1))
    assert Index.load(folder) == before


def refused(folder):
    with pytest.raises(DataError) as error:
        Index.load(folder)
    return str(error.value)


def test_no_index(tmp_path):
    message = refused(tmp_path)
    assert f"{tmp_path} has no index.json" in message
    assert "run it again" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", ""), (b"\xff\xfe", ""), (b"", ""), (b"[]", "$ is `array`; it must be `object`")],
)
def test_not_json(folder, content, words):
    (folder / "index.json").write_bytes(content)
    assert f"{folder}/index.json is damaged: {words}" in refused(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(format="mds"), "format is 'mds'; this is not an index of hpctrain-sh"),
        (lambda c: c.update(version=2), "found version 2, this hpctrain reads 1"),
        (lambda c: c.pop("fields"), "is damaged: $: the key `fields` is missing"),
        (lambda c: c["shards"][0].pop("bytes"), "$.shards[0]: the key `bytes` is missing"),
        (
            lambda c: c["shards"][0].update(count="many"),
            '$.shards[0].count is "many"; it must be `int`',
        ),
        (lambda c: c.update(shards=3), "$.shards is 3; it must be `array`"),
        (lambda c: c["shards"][0].update(count=1e30), "$.shards[0].count is 1e+30; it must"),
        (lambda c: c["shards"][0].update(count=0), "lists 0 samples"),
        (lambda c: c["shards"][0].update(path="../train-00000.h5"), "leaves the data set's folder"),
        (lambda c: c["shards"][0].update(path="/etc/passwd"), "leaves the data set's folder"),
        (lambda c: c["shards"][0].update(path=""), "leaves the data set's folder"),
        (lambda c: c["fields"]["x"].update(dtype="complex64"), "complex64 is not supported; allow"),
        (lambda c: c["fields"]["x"].update(shape=[0]), "shape [0] has no elements"),
        (lambda c: c["shards"][0].update(count=5), "does not fit its fields and shards"),
    ],
)
def test_an_index_that_cannot_be_read(folder, change, words):
    edit(folder, change)
    message = refused(folder)
    assert message.startswith(f"{folder}/index.json")
    assert words in message


def test_an_unknown_split_names_those_that_exist(folder):
    with pytest.raises(DataError, match=r"no split 'test'; this data set has train, val"):
        Index.load(folder).split("test")


def test_a_missing_shard(folder):
    path = folder / Index.load(folder).shards[0].path
    path.unlink()
    with pytest.raises(DataError, match=f"shard {path} is missing"):
        Index.load(folder).check(folder)


@pytest.mark.parametrize(("change", "word"), [(-1, "truncated"), (1, "changed")])
def test_a_shard_of_another_size(folder, change, word):
    shard = Index.load(folder).shards[0]
    os.truncate(folder / shard.path, shard.bytes + change)
    with pytest.raises(DataError) as error:
        Index.load(folder).check(folder)
    assert f"is {word}: it has {shard.bytes + change} bytes" in str(error.value)
    assert str(error.value).endswith(f"lists {shard.bytes}")


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "a b", "é", "x\n"])
def test_names_that_are_not_portable(name):
    assert "a name has letters, digits" in name_problem(name, "field")


@pytest.mark.parametrize("wrong", [1e30, [], "x"])
def test_any_provenance_of_a_writer_is_read(tmp_path, wrong):
    batches = [("train", {"x": np.arange(6)})]
    provenance = dict.fromkeys(("options", "left_out", "beside", "source"), wrong)
    write_shards(tmp_path / "set", batches, provenance=provenance)
    assert main(["inspect", str(tmp_path / "set"), "--verify"]) == 0
    assert not Index.load(tmp_path / "set").told("options")
