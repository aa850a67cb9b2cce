import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.samplers.permutation import (
    SMALL,
    groups,
    hashes,
    make_key,
    permute,
    permute_each,
)


@given(st.lists(st.integers(-5, 5) | st.integers(-(2**62), 2**62)), st.booleans())
def test_groups_partition_the_rows(labels, ascending):
    labels = np.array(sorted(labels) if ascending else labels, dtype=np.int64)
    found = groups(labels)
    assert [label for label, _ in found] == sorted(set(labels.tolist()))
    places = np.arange(len(labels))
    assert sorted(place for _, rows in found for place in places[rows].tolist()) == places.tolist()
    for label, rows in found:
        assert (labels[rows] == label).all()
        assert (np.diff(places[rows]) > 0).all()


@given(
    st.sampled_from([1, 2, 7, 100, SMALL, SMALL + 1, 10_000]),
    st.integers(0, 2**64 - 1),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10**6)), max_size=50),
)
def test_each_value_goes_through_the_permutation_of_its_number(count, key, pairs):
    numbers, values = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    values = values % count
    mapped = permute_each(count, key, numbers, values)
    for number in set(numbers.tolist()):
        own = int(hashes(key, np.array([number]))[0])
        chosen = numbers == number
        assert np.array_equal(mapped[chosen], permute(count, own, values[chosen]))


def test_stored_values_are_reproduced():
    # A change here reorders the data of every run that is resumed.
    assert make_key(1, 2, 3) == 7702586659592502839
    assert hashes(5, np.arange(2)).tolist() == [7134611160154358618, 13877614986023876344]
    assert permute(10, 7, np.arange(10)).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]
    assert permute(5000, 7, np.arange(3)).tolist() == [3866, 2924, 1347]
    numbers, values = np.array([0, 0, 1, 9]), np.array([0, 1, 0, 3])
    assert permute_each(4, 7, numbers, values).tolist() == [2, 3, 0, 0]
    assert permute_each(5000, 7, numbers[::3], values[::3]).tolist() == [3645, 2248]
