import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.samplers.order import Order, Repeat
from hpctrain.data.samplers.subset import Subset, column, parse_slice, parse_subset
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import ConfigError, DataError
from tests.data.samplers import check_pure, everything


@given(st.lists(st.integers(0, 999), min_size=1, max_size=200), st.data())
def test_a_subset_gives_its_indices_and_no_others(indices, data):
    subset = Subset(Order(len(indices), 1), np.array(indices))
    assert subset.count == len(indices)
    assert sorted(everything(subset, 3).tolist()) == sorted(indices)
    check_pure(subset, 2, data, st)


@given(
    st.integers(1, 100),
    st.none() | st.integers(-120, 120),
    st.none() | st.integers(-120, 120),
    st.none() | st.integers(-9, 9).filter(bool),
)
def test_slices_are_those_of_python(count, start, stop, step):
    text = ":".join("" if part is None else str(part) for part in (start, stop, step))
    expected = list(range(count)[start:stop:step])
    if not expected:
        with pytest.raises(ConfigError, match="holds none"):
            parse_slice(text, count)
        return
    indices = parse_slice(text, count)
    assert list(indices) == expected
    unshuffled = Subset(Order(len(indices), 0, shuffle=False), indices)
    assert everything(unshuffled).tolist() == expected
    as_array = Subset(Order(len(indices), 4), np.array(indices))
    assert np.array_equal(everything(Subset(Order(len(indices), 4), indices)), everything(as_array))


@pytest.mark.parametrize("text", ["", "3", "a:b", "1:2:3:4", "::0", "1.5:", "[1:2]"])
def test_text_that_is_not_a_slice_is_refused(text):
    with pytest.raises(ConfigError, match="START:STOP:STEP"):
        parse_slice(text, 10)


def test_a_subset_works_with_other_samplers():
    indices = np.arange(0, 1000, 7)
    blocks = Subset(BlockOrder(len(indices), 0, 10, 3), indices)
    assert np.array_equal(np.sort(everything(blocks)), indices)
    twice = Subset(Repeat(Order(len(indices), 0), 2), indices)
    assert np.array_equal(np.unique(everything(twice), return_counts=True)[1], np.full(143, 2))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (np.array([], dtype=int), "holds none"),
        (np.array([3, 10]), "index 10; the data set has 0 to 9"),
        (np.array([0.5]), "float64"),
        (np.array([True, False]), "bool"),
        (np.array([[1]]), "list of integers"),
    ],
)
def test_invalid_indices_are_refused(tmp_path, indices, message):
    np.save(tmp_path / "indices.npy", indices)
    with pytest.raises(DataError, match=message):
        parse_subset(f"{tmp_path}/indices.npy", 10)


@pytest.mark.parametrize("indices", [np.arange(5), range(5)])
def test_a_sampler_of_more_samples_is_refused(indices):
    with pytest.raises(IndexError):
        everything(Subset(Order(10, 0), indices))


@pytest.mark.parametrize("chunk", [10, 99, 100, 10**6])
def test_a_column_of_real_data(digits, chunk):
    labels = Reader(digits, "train", fields=["label"])
    values = column(labels, "label", chunk)
    assert np.array_equal(values, labels.read(np.arange(len(labels)))["label"])


class Texts:
    """A source of ten samples with a field of variable length."""

    fields = {"text": Field("uint8", variable=True), "id": Field("int64")}  # noqa: RUF012

    def __len__(self):
        return 10

    def read(self, indices):
        return {"text": Ragged.of([np.zeros(i, np.uint8) for i in indices]), "id": indices}


def test_a_missing_column_is_refused():
    for name in ("label", "text"):
        with pytest.raises(DataError, match=f"no fixed-size field '{name}'; there are id"):
            column(Texts(), name)
