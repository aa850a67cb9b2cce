"""`data_prep repack` writes the samples of a data set into new shards."""

import json
import math
import os
from dataclasses import replace

import h5py
import numpy as np
import pytest
import xxhash

from hpctrain.data.samplers.order import Order
from hpctrain.data.shards.index import Index
from hpctrain.data.sources.reader import Reader
from tests.shards.planted import KINDS, planted
from tests.written import write_shards

COUNT = 300
IMAGES = np.random.default_rng(0).integers(0, 255, (COUNT, 5, 4), dtype=np.uint8)
LABELS = np.arange(COUNT, dtype=np.int64) % 7
NUMBERS = np.arange(COUNT, dtype=np.int32)
TEXTS = [np.arange(i % 9, dtype=np.uint16) + i for i in range(COUNT)]
SPLITS = {"train": slice(0, 240), "val": slice(240, COUNT)}


@pytest.fixture
def repack(data_prep):
    """Return a function that runs `repack` with one worker, unless the arguments say otherwise."""
    return lambda *args: data_prep("repack", *args[:2], "--workers", 1, *args[2:])


@pytest.fixture
def src(tmp_path):
    """Write a data set of many small shards, and return its folder."""
    samples = {"image": IMAGES, "label": LABELS, "number": NUMBERS, "text": TEXTS}
    parts = [(n, {key: value[s] for key, value in samples.items()}) for n, s in SPLITS.items()]
    write_shards(tmp_path / "src", parts, max_bytes=2000, provenance={"command": "by hand"})
    return tmp_path / "src"


@pytest.fixture
def foreign(tmp_path, data_prep):
    """Write the samples of `src` as another program could, index them, and return the folder."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for start, stop in ((0, 100), (100, 240), (240, COUNT)):
        with h5py.File(folder / f"{start:03}.h5", "w") as file:
            images = np.moveaxis(IMAGES[start:stop], 0, 1)
            file.create_dataset("i", data=images, chunks=(2, 16, 4), compression="gzip")
            file["l"] = LABELS[start:stop].astype(">i8")
            file["n"] = NUMBERS[start:stop]
            file["v"] = np.concatenate(TEXTS[start:stop])
            file["o"] = np.cumsum([0, *map(len, TEXTS[start:stop])])
    places = ("image=i", "label=l", "number=n", "text=v:o")
    fields = [word for place in places for word in ("--field", place)]
    split = ("--split", "val=24*,train=*")
    assert data_prep("index", folder, *fields, "--axis", "image=1", *split)[0] == 0
    return folder


def hashes(folder, split):
    """Return the digest of each sample of a split, in the order of the samples."""
    reader = Reader(folder, split)
    rows = reader.read(np.arange(len(reader)))
    return [
        xxhash.xxh3_128_hexdigest(
            b"|".join(name.encode() + rows[name][i].tobytes() for name in sorted(reader.fields))
        )
        for i in range(len(reader))
    ]


def contents(folder):
    """Return the bytes of the shards, and the index without the provenance."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.h5")}
    index = json.loads((folder / "index.json").read_text())
    del index["provenance"]
    return found | {"index": index}


@pytest.mark.parametrize(("kind", "size"), [("foreign", "0.5KB"), ("src", "1MB")])
def test_the_same_samples_in_other_shards(request, tmp_path, repack, kind, size):
    folder, out = request.getfixturevalue(kind), tmp_path / "out"
    code, printed, err = repack(folder, out, "--shard-size", size)
    assert (code, err) == (0, "")
    assert "300 samples (train 240, val 60)" in printed
    for split, where in SPLITS.items():
        assert hashes(out, split) == hashes(folder, split)
        rows = Reader(out, split).read(np.arange(len(NUMBERS[where])))
        assert (rows["number"] == NUMBERS[where]).all()
        assert (rows["image"] == IMAGES[where]).all()
        assert [text.tolist() for text in rows["text"]] == [t.tolist() for t in TEXTS[where]]
    index = Index.load(out)
    # The layout is that of hpctrain for every source.
    assert not any(field.elsewhere for field in index.fields.values())
    if size == "1MB":
        assert len(index.shards) == 2
    came = index.provenance["source"]["from"]
    assert came["digest"] == Index.load(folder).digest
    assert came["provenance"] == dict(Index.load(folder).provenance)
    assert index.provenance["source"]["files"] == len(Index.load(folder).shards)
    assert index.provenance["source"]["bytes"] == sum(s.bytes for s in Index.load(folder).shards)


def test_shards_are_full(tmp_path, repack):
    write_shards(tmp_path / "src", [("train", {"x": np.arange(1000)})], max_bytes=72)
    code, *_ = repack(tmp_path / "src", tmp_path / "out", "--shard-size", "0.8KB")
    assert code == 0
    counts = [shard.count for shard in Index.load(tmp_path / "out").shards]
    assert counts == [100] * 10


@pytest.mark.parametrize("options", [("--shuffle", "5"), ()])
@pytest.mark.usefixtures("any_workers")
def test_the_bytes_do_not_depend_on_the_workers(src, tmp_path, repack, data_prep, options):
    found = []
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        command = (src, out, "--shard-size", "4KB", "--workers", workers)
        assert repack(*command, *options)[0] == 0
        found.append(contents(out))
    assert found[0] == found[1]
    out = tmp_path / "parts"
    for part in ("2/3", "1/3", "3/3"):
        command = (src, out, "--shard-size", "4KB", "--part", part)
        assert repack(*command, *options)[0] == 0
    assert data_prep("finalize", out)[0] == 0
    assert contents(out) == found[0]


def test_a_shuffle_is_that_of_the_seed(foreign, tmp_path, repack):
    folder, orders = foreign, {}
    for seed, size in ((1, "4KB"), (1, "1MB"), (2, "1MB")):
        out = tmp_path / f"{seed}{size}"
        command = (folder, out, "--shuffle", seed, "--shard-size", size)
        assert repack(*command)[0] == 0
        for number, (split, where) in enumerate(SPLITS.items()):
            found = Reader(out, split).read(np.arange(len(NUMBERS[where])))["number"]
            wanted = NUMBERS[where][Order(len(found), seed)(number, np.arange(len(found)))]
            assert (found == wanted).all()
            assert (found != NUMBERS[where]).mean() > 0.9
            assert sorted(hashes(out, split)) == sorted(hashes(folder, split))
            orders.setdefault((seed, split), []).append(found.tolist())
    assert orders[1, "train"][0] == orders[1, "train"][1]
    assert orders[1, "train"][0] != orders[2, "train"][0]


def test_other_splits(src, tmp_path, repack):
    out = tmp_path / "out"
    split = ("--split", "train=0.5,test=0.5", "--stratify", "label")
    assert repack(src, out, *split, "--shuffle", "0")[0] == 0
    index = Index.load(out)
    assert index.splits == ("train", "test")
    both = []
    for name in index.splits:
        rows = Reader(out, name).read(np.arange(index.split(name).count))
        both += rows["number"].tolist()
        assert (np.bincount(rows["label"]) >= COUNT // 14).all()
    assert sorted(both) == NUMBERS.tolist()
    by_file = tmp_path / "by_file"
    pattern = ("--split", "file:a=train-*,b=*")
    assert repack(src, by_file, *pattern)[0] == 0
    assert hashes(by_file, "a") == hashes(src, "train")
    code, _, err = repack(src, tmp_path / "no", *pattern, "--shuffle", "1")
    assert code == 2
    assert "goes by the shards, which --shuffle mixes" in err


def test_categories_are_kept(src, tmp_path, repack):
    names = tuple("abcdefg")
    replace(Index.load(src), categories={"label": names}).save(src)
    assert repack(src, tmp_path / "out")[0] == 0
    assert dict(Index.load(tmp_path / "out").categories) == {"label": names}


def test_a_damaged_shard_is_found(src, tmp_path, repack):
    path = src / Index.load(src).shards[2].path
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    for options in ((), ("--shuffle", "1"), ("--shard-size", "1KB")):
        code, _, err = repack(src, tmp_path / "out", *options)
        assert code == 3
        assert f"shard {path} is changed: its digest is" in err
        assert not (tmp_path / "out" / "index.json").exists()
    os.truncate(path, 100)
    code, _, err = repack(src, tmp_path / "out")
    assert code == 3
    assert f"shard {path} is truncated" in err
    path.unlink()
    assert f"shard {path} is missing" in repack(src, tmp_path / "out")[2]


def test_an_old_index_without_elements(src, tmp_path, repack):
    content = json.loads((src / "index.json").read_text())
    for shard in content["shards"]:
        del shard["elements"]
    (src / "index.json").write_text(json.dumps(content))
    assert repack(src, tmp_path / "out")[0] == 0
    assert hashes(tmp_path / "out", "train") == hashes(src, "train")


def test_samples_of_very_different_lengths(tmp_path, repack):
    """Blocks are bounded in bytes, but pieces by the average size of a sample."""
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(400) < 0.02, 200_000, 3)
    texts = [np.full(n, i % 251, np.uint8) for i, n in enumerate(lengths.tolist())]
    write_shards(tmp_path / "src", [("train", {"text": texts, "n": np.arange(400)})])
    for options in ((), ("--shuffle", "1")):
        out = tmp_path / f"out{len(options)}"
        assert repack(tmp_path / "src", out, "--shard-size", "1MB", *options)[0] == 0
        rows = Reader(out, "train").read(np.arange(400))
        for i, text in zip(rows["n"].tolist(), rows["text"], strict=True):
            assert len(text) == lengths[i]
            assert (text == i % 251).all()
        assert len(Index.load(out).shards) >= math.ceil(lengths.sum() / 1e6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_shard_cannot_show_another_file(tmp_path, data_prep, kind):
    secret = tmp_path / "secret.txt"
    secret.write_bytes(b"the private key of whoever repacks")
    folder = planted(tmp_path / "set", secret, kind)
    for command in (("repack", folder, tmp_path / "out"), ("inspect", folder, "--verify")):
        code, out, err = data_prep(*command)
        assert code == 3
        assert "'x' is " in out + err
        assert str(secret.read_bytes()[0]) not in out
    assert not (tmp_path / "out").exists()
