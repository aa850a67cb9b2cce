"""`data_prep diff` names the differences between two data sets."""

import json
import shutil

import numpy as np
import pytest

from data_prep.datasets.dataset import DataSet
from data_prep.tools.diff import _only, difference, hashes
from hpctrain.data.format import write_shards
from hpctrain.data.ragged import Ragged

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 3))
TEXT = [np.frombuffer(b"ab" * i, np.uint8) for i in range(50)]


@pytest.fixture
def write(tmp_path):
    def write(name, max_bytes=2**20, provenance=None, **batch):
        return DataSet(_write(tmp_path / name, [("train", batch)], max_bytes, provenance))

    return write


def _write(folder, batches, max_bytes=2**20, provenance=None):
    write_shards(folder, batches, max_bytes=max_bytes, provenance=provenance)
    return folder


def test_the_same(write, data_prep):
    a = write("a", x=X, text=TEXT)
    b = write("b", x=X, text=TEXT, max_bytes=999, provenance={"command": "other"})
    assert len(b.index.shards) > 3
    assert difference(a, b).equal
    for options in ([], ["--json"], ["--quiet"]):
        code, out, err = data_prep("diff", a.folder, b.folder, *options)
        assert (code, err) == (0, "")
        assert bool(out) == (options != ["--quiet"])
    assert "the same samples in the same order" in data_prep("diff", a.folder, b.folder)[1]
    assert data_prep("diff", a.folder, a.folder)[0] == 0


def test_another_order(write, data_prep):
    order = RNG.permutation(50)
    a, b = write("a", x=X, text=TEXT), write("b", x=X[order], text=[TEXT[i] for i in order])
    first = int(np.argmax(order != np.arange(50)))
    said = f"the same samples in another order (first: train {first})"
    assert difference(a, b).samples == {"train": [said]}
    code, out, _ = data_prep("diff", a.folder, b.folder, "--json")
    assert code == 1
    assert json.loads(out)["equal"] is False


def test_values_that_differ(write):
    x, text = X.copy(), list(TEXT)
    x[12, 1] += 0.5
    x[13, 0] = np.nan
    text[13] = TEXT[14]
    found = difference(write("a", x=X, text=TEXT), write("b", x=x, text=text))
    assert found.samples == {
        "train": [
            "2 samples are only in A (first: train 12)",
            "2 samples are only in B (first: train 12)",
            "of 2 that differ: 1 in field text",
            "of 2 that differ: 2 in field x, by up to 0.5",
        ]
    }


def test_equal_nans_are_equal(write):
    x = np.full(5, np.nan)
    a, b = write("a", x=x), write("b", x=x, max_bytes=8)
    assert difference(a, b).equal


def test_more_of_the_same(write):
    """A sample that occurs several times is counted several times."""
    x = np.array([1, 2, 2, 3])
    found = difference(write("a", x=x), write("b", x=np.array([2, 1, 2, 2, 3, 3])))
    assert found.samples == {
        "train": ["4 samples in A, 6 in B", "2 samples are only in B (first: train 3)"]
    }


def test_samples_in_another_split(tmp_path):
    x = np.arange(10)
    a = [("train", {"x": x[:8]}), ("val", {"x": x[8:]})]
    b = [("train", {"x": x[:7]}), ("val", {"x": x[7:9]}), ("test", {"x": x[9:]})]
    one, other = (DataSet(_write(tmp_path / name, v)) for name, v in (("a", a), ("b", b)))
    assert difference(one, other).samples == {
        "train": [
            "8 samples in A, 7 in B",
            "1 sample is only in A (first: train 7)",
            "1 of A's train are in B's val",
        ],
        "val": [
            "1 sample is only in A (first: val 1)",
            "1 sample is only in B (first: val 0)",
            "1 of A's val are in B's test",
        ],
        "test": ["is only in B: 1 samples"],
    }


def test_schemas_that_differ(write, data_prep):
    a, b = write("a", x=X, y=X, z=X), write("b", x=X, y=X.astype(np.float32), w=TEXT)
    found = difference(a, b)
    assert found.schema == [
        "field y is float64[3] in A, float32[3] in B",
        "field z float64[3] is only in A",
        "field w uint8[*] is only in B",
    ]
    assert found.samples == {"train": []}  # x is the same
    assert data_prep("diff", a.folder, b.folder)[0] == 1
    c = write("c", other=X)
    assert "no field is in both" in data_prep("diff", a.folder, c.folder)[1]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (["a", "b"], ["a", "c"], ["field x: other categories: 1 is 'b' in A, 'c' in B"]),
        (["a"], ["a", "c"], ["field x: other categories: 1 is 'none' in A, 'c' in B"]),
        (["a"], [], ["field x: only A has names for its values"]),
        (["a"], ["a"], []),
    ],
)
def test_categories_that_differ(write, monkeypatch, ours, theirs, said):
    a, b = write("a", x=np.arange(3)), write("b", x=np.arange(3), max_bytes=8)
    monkeypatch.setattr(DataSet, "categories", lambda data, _: ours if data is a else theirs)
    found = difference(a, b)
    assert found.schema == said
    assert found.samples == {"train": []}


def test_how_they_were_made(write, data_prep):
    made = {"command": "one", "created": "1", "options": {"split": "train=1", "same": 0}}
    other = {"command": "two", "created": "2", "options": {"split": "val=1", "same": 0}}
    a, b = write("a", x=X, provenance=made), write("b", x=X, provenance=other)
    found = difference(a, b)
    assert found.equal
    assert found.made == [
        "command: one in A, two in B",
        "options.split: train=1 in A, val=1 in B",
    ]
    assert difference(a, write("c", x=X)).made == ["B does not say how it was made"]
    code, out, _ = data_prep("diff", a.folder, b.folder)
    assert (code, "how they were made (no difference of the data)" in out) == (0, True)


def test_trouble(write, tmp_path, data_prep):
    a, b = write("a", x=X), write("b", x=X + 1)
    assert data_prep("diff", a.folder, tmp_path / "missing")[0] == 3
    shutil.copy(b.folder / "index.json", a.folder / "index.json")
    (a.folder / "train-00000.h5").write_bytes(b"damaged")
    code, _, err = data_prep("diff", a.folder, b.folder)
    assert (code, "is truncated" in err) == (3, True)
    assert data_prep("diff", a.folder)[0] == 2


def test_hashes_do_not_depend_on_blocks():
    text = Ragged.of(TEXT)
    rows = {"text": text, "x": X, "n": np.arange(50)}
    whole = hashes(rows)
    parts = [
        hashes({"text": text.rows(i, i + 5), "x": X[i : i + 5], "n": np.arange(i, i + 5)})
        for i in range(0, 50, 5)
    ]
    assert np.array_equal(whole, np.concatenate(parts))
    assert len(np.unique(whole)) == 50
    # Lengths are hashed too, so "ab" and "" differ from "a" and "b".
    one = {"a": Ragged.of([np.uint8([1, 2])]), "b": Ragged.of([np.uint8([])])}
    other = {"a": Ragged.of([np.uint8([1])]), "b": Ragged.of([np.uint8([2])])}
    assert hashes(one) != hashes(other)


def test_only_against_counting():
    from collections import Counter

    for _ in range(50):
        a, b = (RNG.integers(0, 6, int(RNG.integers(0, 20))) for _ in "ab")
        v = [hashes({"x": x}) if len(x) else np.empty(0, "V16") for x in (a, b)]
        only_a, only_b = _only(*v)
        assert Counter(a[only_a].tolist()) == Counter(a.tolist()) - Counter(b.tolist())
        assert Counter(b[only_b].tolist()) == Counter(b.tolist()) - Counter(a.tolist())
