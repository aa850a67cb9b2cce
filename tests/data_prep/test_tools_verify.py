"""`data_prep inspect --verify` finds everything in which a data set differs from its index."""

import json
import os

import h5py
import hdf5plugin
import numpy as np
import pytest

from data_prep.dataset import load, reader_of
from data_prep.tools.verify import verify
from hpctrain.data.shards.index import Index, Shard
from hpctrain.data.shards.shard import digest_file
from tests.written import write_shards

VALUES = ("mean", "std", "min", "max", "nonfinite", "nan")


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a data set with four train shards and one val shard."""
    rng = np.random.default_rng(0)
    ids = np.arange(400)
    text = [np.frombuffer(b"word " * (i % 7), np.uint8) for i in ids]
    batch = {"x": rng.normal(5, 2, (400, 8)), "id": ids, "text": text}
    val = {"x": np.ones((3, 8)), "id": ids[:3], "text": text[:3]}
    write_shards(tmp_path / "set", [("train", batch), ("val", val)], max_bytes=10_000)
    assert len(Index.load(tmp_path / "set").shards) == 5
    return tmp_path / "set"


def relist(folder, name):
    """Update the size and the digest of a shard in the index to those of its file."""
    content = json.loads((folder / "index.json").read_text())
    for shard in content["shards"]:
        if shard["path"] == name:
            shard["bytes"] = os.path.getsize(folder / name)
            shard["digest"] = digest_file(folder / name)
    edited(folder, content)


def edited(folder, content):
    """Write an index with this content, and with the digest that belongs to it."""
    content = dict(content)
    text = json.dumps(content | {"digest": _digest(content)})
    Index.loads(text.encode(), "index.json").save(folder)


def _digest(content):
    from hpctrain.data.shards.field import Field

    return Index(
        {
            n: Field(f["dtype"], tuple(f["shape"]), f["variable"])
            for n, f in content["fields"].items()
        },
        tuple(
            Shard(s["path"], s["split"], s["count"], s["bytes"], s["digest"])
            for s in content["shards"]
        ),
    ).digest


def problems(folder, **kwargs):
    return {*verify(folder, load(folder), **kwargs)}


def test_a_sound_data_set(folder, data_prep):
    code, out, err = data_prep("inspect", folder, "--verify")
    assert (code, err) == (0, "")
    assert "are as the index says: 403 samples (train 400, val 3) in 5 shards" in out


def test_every_problem_is_named(folder, data_prep):
    index = Index.load(folder)
    names = [shard.path for shard in index.shards]
    (folder / names[0]).unlink()
    with open(folder / names[1], "r+b") as file:
        file.truncate(5000)
    with h5py.File(folder / names[2], "r+") as file:
        file["x"][0, 0] += 1e-9
    (folder / names[4]).write_bytes(b"\0" * index.shards[4].bytes)
    code, out, err = data_prep("inspect", folder, "--verify")
    assert code == 3
    assert err == f"data_prep: {folder}: 4 problems, in 4 of 5 shards\n"
    lines = out.splitlines()
    assert len(lines) == 4
    assert lines[0] == f"{names[0]}: is missing; index.json lists it"
    assert lines[1].startswith(f"{names[1]}: is truncated: it has 5000 bytes, index.json lists")
    assert lines[2].startswith(f"{names[2]}: its content has the digest xxh3_128:")
    assert lines[3].startswith(f"{names[4]}: is damaged: ")


def test_a_shard_of_another_schema(folder):
    name = "val-00000.h5"
    with h5py.File(folder / name, "r+") as file:
        del file["id"]
        file["id"] = h5py.ExternalLink("train-00000.h5", "/id")
    relist(folder, name)
    ((_, problem),) = problems(folder)
    assert problem.startswith("'id' is a link into train-00000.h5; the samples must lie in the")
    with h5py.File(folder / name, "r+") as file:
        del file["x"]
        file["x"] = np.ones((3, 9), np.float32)
    relist(folder, name)
    assert problems(folder) == {(name, "'x' is float32 [3, 9], the index says float64 [3, 8]")}


@pytest.mark.parametrize(
    ("key", "value"), [("min", -99.0), ("max", 0), ("mean", 4.9), ("std", 2.001), ("nonfinite", 1)]
)
def test_statistics_that_are_not_those_of_the_data(folder, key, value):
    content = json.loads((folder / "index.json").read_text())
    content["statistics"]["train"]["x"][key] = value
    edited(folder, content)
    ((shard, problem),) = problems(folder)
    assert shard == ""
    assert problem.startswith("its statistics of split 'train', field 'x' are Statistics(")
    assert f"{key}={value}, " in problem.partition("; the data has ")[0].replace(")", ", ")


def test_compressed_shards_are_read(folder):
    """Other programs may store shards in chunks, with filters or as big-endian numbers."""
    name = "val-00000.h5"
    with h5py.File(folder / name, "r+") as file:
        for field, options in (("x", hdf5plugin.Zstd()), ("text/values", hdf5plugin.LZ4())):
            values = file[field][...]
            del file[field]
            file.create_dataset(field, data=values, chunks=True, **dict(options))
        ids = file["id"][...]
        del file["id"]
        file.create_dataset("id", data=ids.astype(">i8"), chunks=(2,), compression="gzip")
    relist(folder, name)
    assert problems(folder) == set()
    index = load(folder)
    (shard,) = index.split("val").shards
    ids = reader_of(folder, index.fields, [shard]).read(np.arange(3))["id"]
    assert ids.tolist() == [0, 1, 2]
    assert ids.dtype == np.dtype("=i8")


def test_no_data_set(tmp_path, data_prep):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, why in (
        ("missing", "does not exist"),
        ("file", "is a file"),
        ("empty", "has no index.json"),
    ):
        for how in (["--verify"], []):
            code, out, err = data_prep("inspect", tmp_path / name, *how)
            assert (code, out) == (3, "")
            assert why in err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shards": []}, "it lists no shards"),
        ({"fields": {}}, "it lists no fields"),
        ({"provenance": "made"}, '$.provenance is "made"; it must be `object`'),
        (
            {"statistics": {"train": {"x": dict.fromkeys(VALUES, "much")}}},
            ".mean is `str`; it must be `int | float | null`",
        ),
    ],
)
def test_an_index_that_is_no_index(folder, data_prep, change, why):
    content = json.loads((folder / "index.json").read_text()) | change
    content["digest"] = _digest(content)
    (folder / "index.json").write_text(json.dumps(content))
    for how in (["--verify"], []):
        code, out, err = data_prep("inspect", folder, *how)
        assert (code, out) == (3, "")
        assert err.startswith(f"data_prep: {folder}/index.json is damaged: ")
        assert why in err
