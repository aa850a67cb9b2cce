import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.loading.loader import Loader
from hpctrain.data.shards.index import Index, Shard
from hpctrain.data.sources.reader import Reader
from hpctrain.data.sources.windows import Windows
from hpctrain.errors import DataError
from tests.written import write_shards

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any)


def write(folder, lengths, max_bytes):
    stop = np.cumsum(lengths)
    texts = [np.arange(end - n, end, dtype=np.uint16) for n, end in zip(lengths, stop, strict=True)]
    write_shards(
        folder, [("train", {"text": texts, "n": np.arange(len(texts))})], max_bytes=max_bytes
    )
    return Reader(folder, "train")


def expected(reader, length, stride):
    """Return the windows and their document numbers as lists, cut by a plain loop."""
    windows = []
    for shard in range(len(reader.shards)):
        offsets = reader.offsets("text", shard)
        first = int(reader._samples.firsts[shard])
        count = reader.shards[shard].count
        samples = reader.read(np.arange(first, first + count))["text"]
        documents = np.repeat(np.arange(count), np.diff(offsets))
        for start in range(0, len(samples.values) - length + 1, stride):
            own = documents[start : start + length]
            numbers = np.unique(own, return_inverse=True)[1]
            windows.append((samples.values[start : start + length].tolist(), numbers.tolist()))
    return windows


@settings(max_examples=25, deadline=None)
@given(
    lengths=lengths,
    length=st.integers(1, 8),
    stride=st.integers(1, 10),
    max_bytes=st.sampled_from([60, 200, 10**6]),
)
def test_windows_are_those_of_the_stream(tmp_path_factory, lengths, length, stride, max_bytes):
    reader = write(tmp_path_factory.mktemp("set"), lengths, max_bytes)
    wanted = expected(reader, length, stride)
    if not wanted:
        with pytest.raises(DataError, match=f"has a window of {length}: the longest has"):
            Windows(reader, "text", length, stride)
        return
    windows = Windows(reader, "text", length, stride, documents=True)
    assert len(windows) == len(wanted)
    some = np.random.default_rng(0).integers(0, len(wanted), 50)
    found = windows.read(some)
    assert found["text"].tolist() == [wanted[i][0] for i in some]
    assert found["text_document"].tolist() == [wanted[i][1] for i in some]
    for (name, first), row in zip(windows.sample_ids(some[:5]), found["text"], strict=False):
        path, dataset = name.rsplit(":", 1)
        with h5py.File(path) as file:
            assert file[dataset][first : first + length].tolist() == row.tolist()


def test_the_loader_takes_them(tmp_path):
    windows = Windows(write(tmp_path, [7] * 30, 100), "text", 5, 4)
    loader = Loader(windows, global_batch_size=4, tail="pad", shuffle=False, max_epochs=1)
    rows = [row for batch in loader for row in batch["text"][batch["mask"]].tolist()]
    assert rows == windows.read(np.arange(len(windows)))["text"].tolist()


def test_an_index_without_elements(tmp_path):
    reader = write(tmp_path, [4, 3, 9, 2], 30)
    assert [shard.elements for shard in reader.shards] != [{}] * len(reader.shards)
    index = Index.load(tmp_path)
    bare = tuple(Shard(s.path, s.split, s.count, s.bytes, s.digest) for s in index.shards)
    Index(index.fields, bare).save(tmp_path)
    assert "elements" not in (tmp_path / "index.json").read_text()
    again = Reader(tmp_path, "train")
    assert again.elements("text").tolist() == reader.elements("text").tolist()
    assert len(Windows(again, "text", 3)) == len(Windows(reader, "text", 3))


def test_what_cannot_be_cut(tmp_path):
    reader = write(tmp_path, [4, 3], 1000)
    with pytest.raises(DataError, match="no variable-length field 'n' to cut windows from; it has"):
        Windows(reader, "n", 3)
    with pytest.raises(IndexError, match="of 2 windows"):
        Windows(reader, "text", 3).read(np.array([2]))
