import json
import math
import warnings
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from data_prep.writing.moments import BLOCK, MOST_CLASSES, Moments
from hpctrain.base.files.record import decode
from hpctrain.data.shards.field import DTYPES
from hpctrain.data.shards.ragged import Ragged

rng = np.random.default_rng(0)


def of(*parts):
    moments = Moments()
    for part in parts:
        moments.add(part)
    return moments.result()


def exact(values):
    """Return the mean and standard deviation of the population, computed in exact integers."""
    values = [int(value) for value in values.reshape(-1)]
    n, total, squares = len(values), sum(values), sum(value * value for value in values)
    return total / n, math.sqrt((squares * n - total * total) / (n * n))


@pytest.mark.parametrize("dtype", [name for name in DTYPES if "int" in name])
@pytest.mark.parametrize("size", [1, 255, 257, 300_001])
def test_integers(dtype, size):
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, size, dtype, endpoint=True)
    if size > 1:
        x[:2] = info.min, info.max
    found, (mean, std) = of(x), exact(x)
    scale = max(abs(info.min), info.max)
    assert found.mean == pytest.approx(mean, rel=1e-12, abs=1e-12 * scale)
    assert found.std == pytest.approx(std, rel=1e-12)
    assert (found.min, found.max) == (x.min(), x.max())


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint32"])
@pytest.mark.parametrize("order", ["random", "sorted", "every 64th"])
def test_a_large_mean_costs_no_digits(dtype, order):
    """The order "every 64th" puts the pivot, the mean of every 64th value, far from the others."""
    mean = 2.0**22 if dtype == "float32" else 1e9
    x = (mean + np.round(rng.normal(size=3 * BLOCK + 17) * 8)).astype(dtype)
    if order == "sorted":
        x.sort()
    if order == "every 64th":
        x[::64] += 1000
    wide = x.astype(np.longdouble)
    found = of(x.reshape(-1, 1))
    assert found.mean == pytest.approx(float(wide.mean()), rel=1e-14)
    assert found.std == pytest.approx(float(wide.std()), rel=1e-11)


@settings(max_examples=200, deadline=None)
@given(
    values=hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        st.tuples(st.integers(0, 40), st.integers(1, 3)),
    ),
    cut=st.integers(0, 40),
)
def test_what_is_not_finite_is_counted(values, cut):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = of(values[:cut], values[cut:])
    assert found.nan == np.isnan(values).sum()
    assert found.nonfinite == (~np.isfinite(values)).sum()
    finite = values[np.isfinite(values)]
    if not len(finite):
        assert (found.mean, found.std, found.min, found.max) == (None, None, None, None)
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    if values.dtype != np.float64:  # whose largest numbers have no sum
        wide = finite.astype(np.float64)
        scale = np.abs(wide).max()
        assert found.mean == pytest.approx(wide.mean(), rel=1e-9, abs=1e-12 * scale)
        assert found.std == pytest.approx(wide.std(), rel=1e-9, abs=1e-12 * scale)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint32"])
def test_classes(dtype):
    low = -3 if dtype.startswith("i") else 0
    x = rng.integers(low, 100, 5000).astype(dtype)
    found, counts = np.unique(x, return_counts=True)
    expected = dict(zip(found.tolist(), counts.tolist(), strict=True))
    assert of(x[:1700], x[1700:]).classes == expected
    assert list(of(x).classes) == sorted(expected)


@pytest.mark.parametrize("step", [1, 10**6])
def test_more_classes_than_are_counted_are_none(step):
    x = np.arange(MOST_CLASSES) * step
    assert len(of(x).classes) == MOST_CLASSES
    assert of(x, np.array([-1])).classes is None
    assert of(np.append(x, -1), x).classes is None
    assert of(np.append(x, -1)).mean is not None


@pytest.mark.parametrize(
    "samples", [np.zeros(4), np.zeros((4, 1), int), Ragged.of([np.zeros(4, int)])]
)
def test_no_classes(samples):
    assert of(samples).classes is None
    assert of(samples, np.zeros(4, int)).classes is None


def test_lengths():
    samples = [rng.integers(0, 9, length) for length in (5, 0, 1, 30)]
    found = of(Ragged.of(samples[:3]), Ragged.of(samples[3:]))
    lengths = found.lengths
    assert (lengths.min, lengths.max, lengths.total, lengths.mean) == (0, 30, 36, 9)
    assert lengths.std == pytest.approx(np.std([5, 0, 1, 30]))
    everything = np.concatenate(samples)
    assert found.mean == pytest.approx(everything.mean())
    assert (found.min, found.max) == (everything.min(), everything.max())


@pytest.mark.parametrize(
    "parts",
    [
        [rng.normal(size=(50, 3)), np.array([[np.nan, np.inf, -1.0]]), rng.normal(size=(9, 3))],
        [np.arange(10), np.arange(5, 500), np.array([-(2**63)])],
        [np.arange(10), np.arange(500_000)],
        [Ragged.of([np.arange(3), np.arange(0)]), Ragged.of([np.arange(9)])],
        [np.array([1e308]), np.array([-1e308]), np.array([1e308])],  # the variance overflows
    ],
    ids=["float", "classes", "too many", "ragged", "overflow"],
)
def test_pieces_are_merged_as_if_they_were_one(parts):
    merged = Moments()
    for part in parts:
        moments = Moments()
        moments.add(part)
        stored = decode(Moments, json.dumps(asdict(moments)).encode(), "piece.json")
        assert repr(stored) == repr(moments)  # NaN is not equal to itself
        merged.merge(stored)
    found, whole = merged.result(), of(*parts)
    for key in ("mean", "std"):
        number = getattr(whole, key)
        assert getattr(found, key) == (number and pytest.approx(number, rel=1e-13))
    for key in ("min", "max", "nonfinite", "nan", "classes", "lengths"):
        assert getattr(found, key) == getattr(whole, key)
