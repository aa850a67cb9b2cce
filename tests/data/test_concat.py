import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.samplers.mixture import Mixture
from hpctrain.data.samplers.order import draw
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.source import Source
from hpctrain.data.sources.concat import Concat
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import DataError
from tests.written import write_shards

COUNTS = (7, 1, 12)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """Return readers of three data sets. Sample i, counted over all, has id i and i text rows."""
    found, first = {}, 0
    for name, count in zip("abc", COUNTS, strict=True):
        ids = np.arange(first, first + count)
        fields = {
            "id": ids,
            "image": np.tile(np.float32(ids)[:, None, None], (1, 2, 3)),
            "text": [np.full((i, 2), i, np.uint8) for i in ids],
        }
        names = [*fields] if name != "b" else [*reversed(fields)]
        folder = tmp_path_factory.mktemp("data") / name
        write_shards(folder, [("train", {key: fields[key] for key in names})], max_bytes=200)
        found[name] = Reader(folder, "train")
        first += count
    return found


@given(st.lists(st.integers(0, sum(COUNTS) - 1), max_size=40))
def test_samples_come_in_the_order_asked(readers, indices):
    both = Concat(readers)
    assert len(both) == sum(COUNTS)
    rows = both.read(np.array(indices, dtype=np.int64))
    assert list(rows) == ["id", "image", "text"]
    assert rows["id"].tolist() == indices
    assert rows["image"].dtype == np.float32
    assert rows["image"].shape == (len(indices), 2, 3)
    assert rows["image"][:, 1, 2].tolist() == indices
    assert isinstance(rows["text"], Ragged)
    assert rows["text"].lengths.tolist() == indices
    for i, index in enumerate(indices):
        assert np.array_equal(rows["text"][i], np.full((index, 2), index, np.uint8))


def test_a_concatenation_is_a_source(readers):
    inner = Concat({"a": readers["a"], "b": readers["b"]})
    whole = Concat({"both": inner, "c": readers["c"]})
    assert whole.read(np.arange(20)[::-1])["id"].tolist() == list(range(20))[::-1]
    mixture = Mixture({name: len(reader) for name, reader in readers.items()})
    ids = Concat(readers).read(draw(mixture, 0, np.arange(100)))["id"]
    assert set(ids.tolist()) == set(range(20))


def test_samples_are_found_in_the_data_set_that_they_came_from(readers):
    whole = Concat({"both": Concat({"a": readers["a"], "b": readers["b"]}), "c": readers["c"]})
    indices = np.random.default_rng(0).permutation(20)
    found = []
    for path, row in whole.sample_ids(indices):
        with h5py.File(path) as file:
            found.append(file["id"][row])
    assert found == indices.tolist()
    assert whole.sample_ids(np.array([7, 8])) == [
        (f"{readers['b'].folder}/train-00000.h5", 0),
        (f"{readers['c'].folder}/train-00000.h5", 0),
    ]


@pytest.mark.parametrize("index", [-1, 20])
def test_indices_outside_are_refused(readers, index):
    with pytest.raises(IndexError, match="of 20 samples"):
        Concat(readers).read(np.array([3, index]))


class Empty(Source):
    """A source without samples, with any fields."""

    def __init__(self, **fields):
        self.fields = fields

    def __len__(self):
        return 0

    def read(self, indices):
        raise AssertionError("nothing to read")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": Field("float32")}, r"field 'x': 'new' has uint8\[3\], 'old' has float32"),
        ({"x": Field("uint8", (4,))}, r"'old' has uint8\[4\]"),
        ({"x": Field("uint8", (3,), True)}, r"'old' has uint8\[\*, 3\]"),
        ({}, r"field 'x': 'new' has uint8\[3\], 'old' has none"),
        (
            {"x": Field("uint8", (3,)), "y": Field("int8")},
            "field 'y': 'new' has none, 'old' has int8",
        ),
    ],
)
def test_fields_that_do_not_agree_are_refused(fields, message):
    with pytest.raises(DataError, match=message):
        Concat({"new": Empty(x=Field("uint8", (3,))), "old": Empty(**fields)})
