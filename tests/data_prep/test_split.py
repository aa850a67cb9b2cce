"""`--split` by fractions always gives a sample the same split, and other forms are parsed."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from data_prep.writing.split import ByColumn, ByFile, Fractions, parse_split
from hpctrain.data.shards.ragged import hash_keys
from hpctrain.errors import ConfigError, DataError

SPLITS = st.lists(st.integers(1, 1000), min_size=1, max_size=5).map(
    lambda parts: Fractions({f"s{i}": part / sum(parts) for i, part in enumerate(parts)})
)


@given(SPLITS, st.lists(st.binary(max_size=20)), st.lists(st.binary(max_size=20)))
def test_a_sample_keeps_its_split_when_data_is_added(split, keys, more):
    assert split.of_keys([*keys, *more])[: len(keys)] == split.of_keys(keys)
    assert split.of_keys(keys) == [split.of_keys([key])[0] for key in keys]


@given(SPLITS, st.lists(st.tuples(st.binary(max_size=4), st.integers(-3, 3)), max_size=60))
def test_stratified(split, samples):
    hashes = hash_keys(key for key, _ in samples)
    strata = np.array([stratum for _, stratum in samples], np.int64)
    numbers = split.stratified(hashes, strata)
    for stratum in set(strata.tolist()):
        rows = np.flatnonzero(strata == stratum)
        ends, got = np.cumsum(list(split.fractions.values())), numbers[rows]
        if len(set(hashes[rows].tolist())) == len(rows):
            cuts = [round(end * len(rows)) for end in ends[:-1].tolist()]
            assert [int((got <= i).sum()) for i in range(len(cuts))] == cuts
        for value in set(hashes[rows].tolist()):
            assert len(set(got[hashes[rows] == value].tolist())) == 1


def test_a_split_that_stays_empty_is_said(data_prep, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"sample {i}")
    files, split = [tmp_path / f"{i}.txt" for i in range(3)], "train=0.9,val=0.1"
    assert parse_split(split).of_keys(b"sample %d" % i for i in range(3)) == ["train"] * 3
    code, printed, _ = data_prep("text", *files, tmp_path / "OUT", "--split", split)
    assert code == 0
    assert printed.splitlines()[1] == (
        "no sample went to val (--split train=0.9,val=0.1); `column:` or `file:` chooses, where a "
        "hash of each of few samples decides"
    )
    by_file = "file:val=2*,train=*"  # the way out that the line names
    code, printed, _ = data_prep("text", *files, tmp_path / "B", "--split", by_file)
    assert code == 0
    assert f"{tmp_path}/B: 3 samples (val 1, train 2) in 2 shards" in printed
    assert "no sample went to" not in printed
    code, _, message = data_prep("text", *files, tmp_path / "C", "--split", "file:train=*,val=2*")
    assert code == 3
    assert "--split file:train=*,val=2*: no file is left for val" in message


def test_hashes_are_those_of_xxh3():
    """This test pins the splits, so that no later version moves a sample to another split."""
    assert hash_keys([b"", b"a"]).tolist() == [xxhash.xxh3_64_intdigest(key) for key in (b"", b"a")]
    assert parse_split("train=0.5,val=0.5").of_keys(b"%d" % i for i in range(8)) == WRITTEN


WRITTEN = ["train", "train", "val", "train", "val", "val", "val", "train"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train", "it is NAME=FRACTION"),
        ("train=x", "is not NAME=FRACTION"),
        ("train=0.5", "the fractions add up to 0.5, not 1"),
        ("train=0.5,train=0.5", "'train' is there twice"),
        ("train=1,val=0", "a fraction is above 0, up to 1"),
        ("train=-1,val=2", "a fraction is above 0, up to 1"),
        ("../x=1", "it is NAME=FRACTION"),
        ("column:", "or column:NAME or file:NAME=PATTERN"),
    ],
)
def test_what_is_no_split(text, said):
    with pytest.raises(ConfigError) as caught:
        parse_split(text)
    assert said in str(caught.value)
    assert repr(text) in str(caught.value)


def test_the_other_forms():
    assert parse_split("column:the split") == ByColumn("the split")
    split = parse_split("file:val=b/*,train=*.txt")
    assert split == ByFile({"val": "b/*", "train": "*.txt"})
    assert [split.of_file(name) for name in ("b/c", "b/c.txt", "a/c.txt")] == [
        *("val", "val", "train")
    ]
    with pytest.raises(DataError, match=r"--split file:val=b/\*,train=\*.txt: no pattern matches"):
        split.of_file("a/c")
