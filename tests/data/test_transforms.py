import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.batch_fields import DTYPES
from hpctrain.data.draws import Draws
from hpctrain.data.shards.index import Statistics
from hpctrain.data.transforms import Cast, Compose, Normalise, RandomCrop, RandomFlip, bind
from hpctrain.errors import ConfigError, DataError

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")],
)
on_devices = pytest.mark.parametrize("device", ["cpu", CUDA])


def images(shape, dtype="uint8", device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 200, shape, generator=generator).to(DTYPES[dtype]).to(device)


def draws(count, start=0, seed=0, epoch=0):
    return Draws(seed, epoch, np.arange(start, start + count))


def batch_of(image):
    return {"image": image, "label": torch.arange(len(image), device=image.device)}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(-5, 2**64), epoch=st.integers(0, 10**6), cut=st.integers(1, 49))
def test_draws_are_those_of_the_sample(seed, epoch, cut):
    """The draws of a sample do not depend on how the samples are divided into batches."""

    def choices(start, stop):
        source = draws(stop - start, start, seed, epoch)
        return torch.stack([source.uniform(), source.uniform(), source.integers(1000).float()])

    whole = choices(0, 50)
    assert torch.equal(torch.cat([choices(0, cut), choices(cut, 50)], 1), whole)
    assert len(whole.unique()) > 100
    assert not torch.equal(draws(50, 0, seed + 1, epoch).uniform(), whole[0])
    assert not torch.equal(draws(50, 0, seed, epoch + 1).uniform(), whole[0])


def test_draws_are_fixed_for_ever():
    source = Draws(7, 3, np.array([0, 1, 10**12]))
    assert source.integers(1000).tolist() == [319, 20, 861]
    assert source.uniform().tolist() == [0.6440566182136536, 0.4645985960960388, 0.9995841383934021]


@on_devices
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    channels=st.integers(1, 4),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    crop=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    padding=st.integers(0, 3),
    dtype=st.sampled_from(["uint8", "float32", "int64", "float16"]),
)
def test_a_random_crop_is_that_of_a_loop(device, count, channels, size, crop, padding, dtype):
    height, width = (min(c, s + 2 * padding) for c, s in zip(crop, size, strict=True))
    image = images((count + 1, channels, *size), dtype, device)[1:]  # a view, like a loader's batch
    before = image.clone()
    transform = RandomCrop((height, width), padding, fill=7)
    found = transform(batch_of(image), draws(count))["image"]
    source = draws(count)
    top = source.integers(size[0] + 2 * padding - height + 1)
    left = source.integers(size[1] + 2 * padding - width + 1)
    for i in range(count):
        padded = torch.full((channels, *(s + 2 * padding for s in size)), 7, dtype=image.dtype)
        padded[:, padding : padding + size[0], padding : padding + size[1]] = before[i].cpu()
        window = padded[:, top[i] : top[i] + height, left[i] : left[i] + width]
        assert torch.equal(found[i].cpu(), window)
    assert torch.equal(image, before)
    assert found.is_contiguous()
    assert found.dtype == image.dtype


@on_devices
@pytest.mark.parametrize(("axis", "dim"), [("width", 3), ("height", 2)])
def test_a_random_flip_is_that_of_a_loop(device, axis, dim):
    image = images((64, 3, 5, 4), device=device)
    before = image.clone()
    found = RandomFlip(0.3, axis=axis)(batch_of(image), draws(64))["image"]
    chosen = draws(64).uniform() < 0.3
    assert 8 < chosen.sum() < 32
    for i in range(64):
        assert torch.equal(found[i], before[i].flip(dim - 1) if chosen[i] else before[i])
    assert torch.equal(image, before)


@pytest.mark.parametrize("transform", [RandomCrop(4, 1, ["image", "target"])])
@pytest.mark.parametrize("flip", [RandomFlip(0.5, ["image", "target"])])
def test_fields_named_together_get_the_same_choice(transform, flip):
    image = images((32, 3, 6, 6))
    batch = {"image": image, "target": image[:, :1].long(), "label": torch.arange(32)}
    for each in (transform, flip, Compose([transform, flip])):
        found = each(batch, draws(32))
        assert torch.equal(found["image"][:, :1].long(), found["target"])
        assert found["label"] is batch["label"]


@on_devices
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "int32"])
@pytest.mark.parametrize("result", ["float32", "float64", "bfloat16", "float16"])
def test_normalise_is_that_of_the_formula(device, dtype, result):
    image = images((4, 3, 5, 6), dtype, device)
    before = image.clone()
    mean, std = [100.0, 50.0, 3.0], [2.0, 30.0, 0.1]
    found = Normalise(mean, std, dtype=result)(batch_of(image), draws(4))["image"]
    wide = image.double()
    expected = (wide - wide.new_tensor(mean).view(3, 1, 1)) / wide.new_tensor(std).view(3, 1, 1)
    assert found.dtype == DTYPES[result]
    tolerance = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 5e-3, "float16": 1e-3}[result]
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(image, before)


def test_normalise_by_the_statistics_of_the_index():
    numbers = {"image": Statistics(10.0, 4.0, 0, 200), "y": Statistics(1.0, 0.5, 0, 2)}
    transform = bind(Compose([Normalise(fields=["image", "y"]), Cast("bfloat16")]), numbers)
    batch = {"image": images((4, 3, 5, 6)), "y": torch.arange(4)}
    found = transform(batch, draws(4))
    assert torch.allclose(found["image"], ((batch["image"].float() - 10) / 4).bfloat16())
    assert found["y"].tolist() == [-2, 0, 2, 4]
    given = Normalise(0.0, 1.0)
    assert bind(given, numbers) is given
    assert bind(RandomFlip(), numbers) is not None


@pytest.mark.parametrize(
    "statistics",
    [
        {},
        {"label": Statistics(1.0, 1.0, 0, 1)},
        {"image": Statistics(None, None, None, None)},
        {"image": Statistics(5.0, 0.0, 5, 5)},
    ],
)
def test_statistics_that_are_of_no_use(statistics):
    with pytest.raises(DataError, match="no usable mean and std of field 'image'"):
        bind(Normalise(), statistics)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cast("int7"), "dtype 'int7': it is one of uint8"),
        (lambda: Normalise(1.0), "needs both mean and std"),
        (lambda: Normalise([1.0, 2.0], [1.0]), "as many"),
        (lambda: Normalise([1.0], [0.0]), "every std above 0"),
        (lambda: Normalise([float("nan")], [1.0]), "finite"),
        (lambda: Normalise(1.0, 1.0, dtype="uint8"), "a floating-point one"),
        (lambda: RandomCrop(0), "RandomCrop of size 0"),
        (lambda: RandomCrop(4, -1), "padding -1"),
        (lambda: RandomFlip(1.5), r"p=1\.5"),
        (lambda: RandomFlip(axis="depth"), "axis='depth'"),
    ],
)
def test_arguments_that_cannot_be(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (Cast("int64", "img"), "wants field 'img'; the batch has image, label"),
        (RandomCrop(9), r"RandomCrop of \[9, 9\].*\{'image': \(6, 6\)\}.*hold the crop"),
        (RandomFlip(fields="label"), r"'label' is \[4\]"),
        (Normalise([1, 2], [1, 1]), r"2 channels, 'image' is \[4, 3, 6, 6\]"),
    ],
)
def test_batches_that_do_not_fit(transform, words):
    with pytest.raises(ConfigError, match=words):
        transform(batch_of(images((4, 3, 6, 6))), draws(4))
