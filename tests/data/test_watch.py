"""A shard that is changed while it is read is noticed before its values are handed out."""

import io
import os
import time

import h5py
import numpy as np
import pytest

from hpctrain.addons.node.stage import Stage
from hpctrain.data.loading.loader import Loader
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Index
from hpctrain.data.sources import datasets
from hpctrain.data.sources.reader import Reader
from hpctrain.data.sources.windows import Windows
from hpctrain.data.workers.pool import Workers
from hpctrain.errors import DataError
from tests.data.test_reader import adopted, rewrite
from tests.written import write_shards

COUNT = 50


@pytest.fixture
def folder(tmp_path):
    """Write 50 samples x = 0, 1, … with tokens of the same value, in 3 shards."""
    tokens = [np.full(3, i, np.uint16) for i in range(COUNT)]
    images = np.repeat(np.arange(COUNT), 4).reshape(COUNT, 2, 2)
    fields = {"image": images, "text": tokens}
    write_shards(tmp_path / "set", [("train", fields)], max_bytes=800)
    assert len(Index.load(tmp_path / "set").shards) == 3
    return tmp_path / "set"


def edit(path):
    """Add 1000 to all values of a shard in place: the file keeps its name and its inode.

    HDF5 refuses to write into a file that the same process reads.
    """
    with h5py.File(io.BytesIO(path.read_bytes()), "r+") as file:
        for name in ("image", "text/values", "x"):
            if name in file:
                file[name][...] = file[name][...] + 1000
        file.flush()
        content = file.id.get_file_image()
    with open(path, "r+b") as file:
        file.write(content)


def shards(folder):
    return [folder / shard.path for shard in Index.load(folder).shards]


def mapped(folder):
    return Reader(folder, "train", ["image"])


def read(folder):
    return Reader(folder, "train", ["image"], mapped=False)


def chunked(folder):
    return mapped(rewrite(folder, {"compression": "gzip"}))


def by_hdf5(folder):
    return mapped(rewrite(folder, {"scaleoffset": 0}))


def windows(folder):
    return Windows(Reader(folder, "train"), "text", 3)


def variable(folder):
    return Reader(folder, "train", ["text"])


def index_alone(folder):
    """Return a reader of files that another program has written."""
    elsewhere = folder.parent / "adopted"
    elsewhere.mkdir()

    def write(file, start, stop):
        file["x"] = np.arange(start, stop)

    return Reader(adopted(elsewhere, {"image": Field("int64", dataset="x")}, write), "train")


WAYS = [mapped, read, chunked, by_hdf5, windows, variable, index_alone]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_changed_value_is_handed_out(folder, way):
    source = way(folder)
    where = source.folder if isinstance(source, Reader) else folder
    seen = []

    def use():
        for batch in Loader(source, global_batch_size=5, prefetch_bytes=0, max_epochs=40):
            (field,) = source.fields
            seen.extend(batch[field].reshape(5, -1)[:, 0].tolist())
            if len(seen) == 10 * COUNT:
                for path in shards(where):
                    edit(path)

    with pytest.raises(DataError) as caught:
        use()
    assert len(seen) >= 10 * COUNT
    assert max(seen) < COUNT
    assert "was changed during the run, at 2" in str(caught.value)
    assert any(f"shard {path} " in str(caught.value) for path in shards(where))


def test_no_changed_value_is_transformed(folder):
    reader = mapped(folder)
    with Workers(reader, as_it_is, 1) as workers:
        loader = Loader(
            reader, global_batch_size=5, prefetch_bytes=0, workers=workers, max_epochs=40
        )
        batches = iter(loader)
        assert next(batches)["image"].max() < COUNT
        for path in shards(folder):
            edit(path)
        with pytest.raises(DataError, match="was changed during the run"):
            assert max(int(batch["image"].max()) for batch in batches) < COUNT


def as_it_is(sample, random):
    return sample


def test_a_staged_copy_is_watched_too(folder, tmp_path):
    (tmp_path / "node").mkdir()
    stage = Stage(folder, tmp_path / "node")
    reader = Reader(folder, "train", ["image"], place=stage)
    assert reader.read(np.arange(COUNT))["image"].max() < COUNT
    for path in shards(folder):
        edit(path)
    assert reader.read(np.arange(COUNT))["image"].max() < COUNT  # the copy is what is read
    copy = stage.path(reader.shards[0])
    edit(copy)
    with pytest.raises(DataError, match=f"shard {copy} was changed during the run"):
        reader.read(np.arange(COUNT))
    stage.close()


@pytest.mark.parametrize("way", [mapped, read, chunked], ids=lambda way: way.__name__)
def test_a_file_that_was_only_touched_is_read_on(folder, way, caplog):
    reader = way(folder)
    reader.read(np.arange(COUNT))
    for path in shards(folder):
        os.utime(path)
    assert reader.read(np.arange(COUNT))["image"][:, 0, 0].tolist() == list(range(COUNT))
    path.chmod(0o600)
    assert reader.read(np.arange(COUNT))["image"][:, 0, 0].tolist() == list(range(COUNT))
    reader.read(np.arange(COUNT))  # the new stamp is known
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == 4
    assert all(" was touched at " in text for text in found)
    assert found[3].endswith("comparing its digest with index.json")


def test_values_of_a_moment_are_read_again(folder):
    """Somebody writes other values, and writes the old ones back before they are compared."""
    reader = mapped(folder)
    path, row = shards(folder)[0], (np.zeros(1, np.int64),) * 2
    right, found = path.read_bytes(), []

    def action(datasets):
        if not found:
            edit(path)
        out = np.empty((1, 2, 2), np.int64)
        datasets.spans("image", *row, 1, out)
        path.write_bytes(right) if not found else None
        found.append(int(out[0, 0, 0]))
        return found[-1]

    assert reader.opened.read(row[0], action) == 0
    assert found == [1000, 0]


def test_a_shard_that_was_not_open_yet(folder):
    reader, others = mapped(folder), mapped(folder)
    reader.read(np.array([0]))
    time.sleep(0.02)  # a tick of the clock that file systems use
    path = shards(folder)[2]
    edit(path)
    reader.read(np.array([0]))
    for each in (reader, others):
        with pytest.raises(DataError, match=f"shard {path} was changed during the run, at 2"):
            each.read(np.array([COUNT - 1]))


def test_a_replaced_shard_is_compared_when_it_is_opened_again(folder, monkeypatch):
    monkeypatch.setattr(datasets, "MAX_SLOTS", 1)
    reader, path = mapped(folder), shards(folder)[0]
    reader.read(np.array([0]))
    same = path.with_name("same")
    same.write_bytes(path.read_bytes())
    same.replace(path)
    assert reader.read(np.array([0]))["image"].max() == 0  # the open file stays as it was
    reader.read(np.array([COUNT - 1]))
    assert reader.read(np.array([0]))["image"].max() == 0
    reader.read(np.array([COUNT - 1]))
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    edit(other)
    other.replace(path)
    with pytest.raises(DataError, match=f"shard {path} was changed during the run, at 2"):
        reader.read(np.array([0]))
