"""Tests of the `data` section, from the command line to the batches of a rank."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import ConfigError, DataError, HpctrainError
from hpctrain.runs.freeze import check
from tests.job.feeds import Build, builder, epoch, values
from tests.written import write_shards


@pytest.fixture
def config(composer: Composer, digits: Path, tmp_path: Path) -> Callable[..., Config]:
    def call(*overrides: str) -> Config:
        where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
        return composer.typed(["experiment=digits", *where, "tracking=off", *overrides])

    return call


@pytest.fixture
def build(config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> Build:
    monkeypatch.setattr(Reader, "block_size", lambda self: 16)  # for many blocks of data.shuffle
    return builder(config)


def labels(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    return values(batches, "label")


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


BLOCKS = ("data.shuffle=block", "data.window=8")
CROP = (
    "data.batch_transforms=[{_target_: hpctrain.data.transforms.RandomCrop, size: 8, padding: 1},"
    "{_target_: hpctrain.data.transforms.RandomFlip},"
    "{_target_: hpctrain.data.transforms.Normalise}]"
)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.shuffle=none",),
        BLOCKS,
        ("data.balance=label",),
        ("data.subset='10:700:2'", "data.repeat=2"),
        (CROP,),
    ],
)
def test_ranks_share_the_global_batches_of_one(build: Build, overrides: tuple[str, ...]) -> None:
    whole = epoch(build(*overrides).training())
    parts = [epoch(build(*overrides, rank=rank, size=2).training()) for rank in range(2)]
    assert len(whole) == len(parts[0]) == len(parts[1]) > 3
    for batch, *shares in zip(whole, *parts, strict=True):
        for name, value in batch.items():
            assert torch.equal(value, torch.cat([share[name] for share in shares])), name


def test_each_kind_of_shuffling_gives_every_sample_once(build: Build, digits: Path) -> None:
    reader = Reader(digits, "train")
    wanted = Counter(reader.read(np.arange(len(reader)))["label"].tolist())  # type: ignore[union-attr]
    for overrides in [(), BLOCKS, ("data.shuffle=none",)]:
        assert Counter(labels(epoch(build(*overrides, "data.tail=pad").training()))) == wanted


def test_classes_come_equally_often(build: Build) -> None:
    for batch in epoch(build("data.balance=label", "train.global_batch_size=50").training()):
        assert torch.bincount(batch["label"], minlength=10).tolist() == [5] * 10


def test_a_part_of_the_split(build: Build, tmp_path: Path, digits: Path) -> None:
    chosen = np.array([5, 99, 400])
    np.save(tmp_path / "chosen.npy", chosen)
    size = "train.global_batch_size=3"
    feed = build(f"data.subset={tmp_path}/chosen.npy", size, "data.shuffle=none").training()
    reader = Reader(digits, "train")
    assert labels(epoch(feed)) == reader.read(chosen)["label"].tolist()  # type: ignore[union-attr]
    assert build("data.subset=':30'", size, "data.repeat=4").training().steps_per_epoch == 40


def test_a_mixture_keeps_its_weights(build: Build, tmp_path: Path, digits: Path) -> None:
    image = np.zeros((50, 1, 8, 8), np.uint8)
    write_shards(tmp_path / "blank", [("train", {"image": image, "label": np.full(50, 77)})])
    feed = build(
        f"data.mixture=[{{name: real, path: {digits}, weight: 3}}, "
        f"{{name: blank, path: {tmp_path}/blank, weight: 1}}]"
    ).training()
    for batch in epoch(feed):
        assert abs(int((batch["label"] == 77).sum()) - 16) <= 1


def test_evaluation_leaves_out_what_is_random(build: Build, digits: Path) -> None:
    builder = build(CROP)
    plain = build("data.batch_transforms=[{_target_: hpctrain.data.transforms.Normalise}]")
    assert same(epoch(builder.evaluation()), epoch(plain.evaluation()))
    batches = epoch(builder.evaluation())
    image = torch.cat([batch["image"][batch["mask"]] for batch in batches])
    statistics = Reader(digits, "train").index.statistics["train"]["image"]
    raw = Reader(digits, "val").read(np.arange(len(image)))["image"]
    wanted = (torch.from_numpy(raw).float() - statistics.mean) / statistics.std  # type: ignore[arg-type, operator]
    assert torch.allclose(image, wanted, atol=1e-5)


AUGMENT = """\
import numpy as np

def flip(sample, random):
    return {**sample, "image": sample["image"][..., ::-1]} if random.random() < 0.5 else sample

def flip_and_scale(sample, random):
    sample = flip(sample, random)
    return {**sample, "image": sample["image"].astype(np.float32) / 16}

def scale(sample, random):
    return {**sample, "image": sample["image"].astype(np.float32) / 16}

def nines(sample, random):
    return flip(sample, random) if sample["label"] == 9 else sample

def flip_batch(batch, draws):
    chosen = (draws.uniform() < 0.5).view(-1, 1, 1, 1)
    return batch | {"image": batch["image"].where(chosen, batch["image"].flip(-1))}
"""


@pytest.fixture
def augment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that returns the overrides for transforms of a module of one's own."""
    (tmp_path / "my_augment.py").write_text(AUGMENT)
    monkeypatch.syspath_prepend(tmp_path)

    def call(*names: str, key: str = "transforms") -> str:
        nodes = (f"{{_target_: my_augment.{name}, _partial_: true}}" for name in names)
        return f"data.{key}=[{','.join(nodes)}]"

    return call


@pytest.mark.parametrize(
    ("name", "key"), [("flip", "transforms"), ("flip_batch", "batch_transforms")]
)
def test_an_evaluation_with_a_random_transform_is_refused(
    build: Build, augment: Callable[..., str], name: str, key: str
) -> None:
    said = rf"data.{key}\[0\] \({name}\) is random .*data.val_{key}=\[\]"
    with pytest.raises(ConfigError, match=said):
        build(augment(name, key=key)).evaluation()


def test_an_evaluation_asks_what_it_uses(build: Build, augment: Callable[..., str]) -> None:
    given = build(augment("flip_and_scale"), augment("scale", key="val_transforms"))
    assert same(epoch(given.evaluation()), epoch(build(augment("scale")).evaluation()))
    # It draws for one class only, which the first samples do not have.
    with pytest.raises(
        ConfigError, match="draws random numbers in an evaluation, for this sample"
    ) as error:
        epoch(build("data.val_split=train", augment("nines")).evaluation())
    assert "in the transform of sample" in error.value.__notes__[0]
    # Whoever gives random ones for the evaluation gets them: test-time augmentation.
    given = build(augment("flip", key="val_transforms"))
    assert not same(epoch(given.evaluation()), epoch(build().evaluation()))
    assert same(epoch(given.evaluation()), epoch(given.evaluation()))


def forget(*args):
    pass


@pytest.mark.parametrize("key", ["transforms", "batch_transforms"])
def test_a_transform_that_returns_nothing_is_named(build: Build, key: str) -> None:
    transform = f"data.{key}=[{{_target_: tests.job.test_build_data.forget, _partial_: true}}]"
    with pytest.raises(DataError, match=r"transform .*forget.* returned NoneType; it must return"):
        epoch(build(transform).training())


def test_a_transform_cannot_replace_the_mask(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "masks_itself.py").write_text("def f(x, random): return {**x, 'mask': 1}")
    monkeypatch.syspath_prepend(tmp_path)
    mine = "data.transforms=[{_target_: masks_itself.f, _partial_: true}]"
    with pytest.raises(DataError, match="a transform returned 'mask'"):
        epoch(build(mine).training())


@pytest.mark.parametrize("key", ["data.transforms", "data.batch_transforms"])
def test_a_transform_must_be_one(build: Build, key: str) -> None:
    with pytest.raises(HpctrainError) as error:
        build(f"{key}=[{{_target_: builtins.dict, size: 8}}]").training()
    wrong = f"{key}[0]={{'_target_': 'builtins.dict', 'size': 8}}: it makes a dict"
    assert wrong in str(error.value)


def test_a_shard_that_was_edited_is_named(build: Build, tmp_path: Path, digits: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in digits.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shard = copy / "train-00000.h5"
    content = bytearray(shard.read_bytes())
    content[-5000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(HpctrainError, match=r"train-00000\.h5"):
        epoch(build(f"data.path={copy}", "data.verify=first_use").training())
    assert epoch(build(f"data.path={copy}").training())  # data.verify=off checks nothing


def test_windows_of_text(build: Build, tmp_path: Path) -> None:
    texts = [np.arange(n, dtype=np.uint16) + 100 * n for n in range(1, 60)]
    write_shards(tmp_path / "text", [("train", {"text": texts}), ("val", {"text": texts})])
    cut = ("data.windows.field=text", "data.windows.length=9", "data.windows.documents=true")
    task = ("task.input=text", "task.target=text_document")
    builder = build(f"data.path={tmp_path}/text", "train.global_batch_size=4", *cut, *task)
    batches = epoch(builder.training())
    assert batches[0]["text"].shape == batches[0]["text_document"].shape == (4, 9)
    assert len(batches) == sum(map(len, texts)) // 9 // 4


def test_samples_of_like_length_and_packed(build: Build, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = [np.full(n, n, np.uint8) for n in random.integers(0, 100, 400)]
    write_shards(tmp_path / "text", [("train", {"text": texts})])
    own = (f"data.path={tmp_path}/text", "data.val_split=null", "train.global_batch_size=8")
    own += ("task.input=text", "task.target=text_length")
    waste = []
    for more in ((), ("data.buckets.field=text",)):
        batches = epoch(build(*own, *more).training())
        padded = sum(batch["text"].numel() for batch in batches)
        waste.append(padded / sum(int(batch["text_length"].sum()) for batch in batches))
    assert waste[1] < 1.15 < 1.5 < waste[0]
    packed = epoch(build(*own, "data.collate=pack").training())
    # With batches that grow, the same samples are in the same order.
    ramp = "train.batch_size_ramp=[{global_batch_size: 2, steps: 3}]"
    ramped = epoch(build(*own, "data.collate=pack", ramp).training())
    assert [len(batch["mask"]) for batch in ramped[:5]] == [2, 2, 2, 8, 8]
    one, other = (torch.cat([batch["text"] for batch in each]) for each in (packed, ramped))
    assert torch.equal(one[: len(other)], other)
    for batch in packed:
        offsets = batch["text_offsets"].tolist()
        assert offsets[-1] == len(batch["text"])
        for start, stop in pairwise(offsets):
            assert batch["text"][start:stop].tolist() == [stop - start] * (stop - start)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.shuffle=true", "data.shuffle=true: allowed are full, block, none"),
        ("data.balance=klass", "data.balance=klass: the fields of data.path are image uint8"),
        ("data.windows.field=image", "data.windows.field=image: it must be a variable-length"),
        ("data.fields=[image,lable]", "data.fields=lable: the fields of data.path are"),
        ("data.mixture=[{name: a}]", "data.mixture[0]={'name': 'a'}: it must be {name:"),
        ("data.mixture=[{name: a, path: /x, wait: 1}]", "data.mixture[0].wait is unknown"),
        ("data.mixture=[{name: a, path: /x, weight: -1}]", "data.mixture[0].weight=-1: it must"),
        ("data.mixture=[{name: a, path: /x, weight: 0}]", "data.mixture: the weights are all 0"),
        ("data.mixture=[{name: a, path: /x, weight: nan}]", "data.mixture[0].weight=nan: it must"),
        ("data.mixture=[{name: a, path: /no}]", "data.mixture[0].path: the data folder /no does"),
        ("data.verify=yes", "data.verify=yes: allowed are off, first_use"),
        ("data.images.size=[3]", "data.images.size=[3]: it must be [height, width]"),
        ("data.images.size=[3,99999]", "data.images.size=[3, 99999]: it must be [height, width]"),
        ("data.stage=sbcast", "data.stage=sbcast has left hpctrain: `data.stage=node` copies"),
        ("data.threads=-1", "data.threads=-1: it must be at least 0"),
        (f"data.windows.length={10**30}", f"data.windows.length={10**30}: it must be less than"),
        ("data.prefetch_mb=1e300", "data.prefetch_mb=1e+300: it must be less than 2^62"),
        ("data.path=nothing://here", "nothing"),
        ("data.mixture=[{name: a, path: s3://b/c}] data.stage=none", "s3://b/c cannot be read in"),
        ("data.transforms=[{target: x}]", "data.transforms[0]._target_=None: it must be package."),
        ("data.val_batch_transforms=[{_target_: no_such.f}]", "no package 'no_such' here"),
        (
            "data.batch_transforms=[{_target_: hpctrain.data.transforms.Normalize}]",
            "data.batch_transforms[0]._target_=hpctrain.data.transforms.Normalize: "
            "hpctrain.data.transforms has no 'Normalize'; it has 'Normalise'",
        ),
        ("data.workers=2", "they apply data.transforms, which is empty"),
        ("data.balance=image", "data.balance=image: it must be one number a sample; it is uint8["),
        ("data.subset=all", "data.subset=all: 'all' is no slice"),
        ("data.subset='9999:'", "data.subset=9999:: the slice '9999:' of 1415 samples holds none"),
        ("data.subset=:10", "of the split 'train' of"),
        ("data.subset=/no.npy", "data.subset=/no.npy: there is no such file"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    config: Callable[..., Config], override: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(HpctrainError) as error:
        check(config(*re.split(r" (?=data)", override)))
    assert words in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("order", [(), ("data.balance=label",)])
@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (np.arange(5.0), "are float64 [5]; they are a list of integers"),
        (np.array(3), "are int64 []; they are a list of integers"),
        (np.array([1, 10**6]), "has the index 1000000; the data set has 0 to"),
        (np.array([-1, 1]), "has the index -1; the data set has 0 to"),
        (np.zeros(0, np.int64), "holds none of them"),
        (None, "it is no file of numpy.save with integers: No data left in file"),
    ],
)
def test_a_file_of_indices_that_cannot_be(
    build: Build, tmp_path: Path, indices: Any, words: str, order: tuple[str, ...]
) -> None:
    path = tmp_path / "subset.npy"
    path.touch()
    if indices is not None:
        np.save(path, indices)
    with pytest.raises(HpctrainError) as error:
        build(f"data.subset={path}", *order).training()
    assert f"data.subset={path}: " in str(error.value)
    assert words in str(error.value)


def test_classes_are_integers(config: Callable[..., Config], tmp_path: Path) -> None:
    write_shards(tmp_path / "w", [(split, {"w": np.ones(99)}) for split in ("train", "val")])
    with pytest.raises(HpctrainError, match=r"data.balance=w: classes are integers; it is float64"):
        check(config(f"data.path={tmp_path}/w", "data.balance=w"))


def test_the_indices_of_a_subset_name_the_run_and_not_their_file(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(file: str, indices: Any) -> str:
        np.save(file, indices)
        return check(config(f"data.subset={file}")).path.name

    monkeypatch.chdir(tmp_path)
    first = name("one.npy", range(100))
    assert name("other.npy", np.arange(100, dtype=np.uint16)) == first
    assert name("one.npy", range(1, 101)) != first
    # The path becomes absolute, because a job of a sweep runs in another folder.
    assert config("data.subset=one.npy").data.subset == str(tmp_path / "one.npy")
    for wrong in ([-1, 5], [5, 1415], [0.5], [[1]], []):
        with pytest.raises(HpctrainError, match=r"one\.npy: (the indices of )?a subset"):
            name("one.npy", wrong)


def test_the_data_decides_the_name_of_a_run_and_not_how_it_is_read(
    config: Callable[..., Config], digits: Path, tmp_path: Path
) -> None:
    def name(*overrides: str) -> str:
        return check(config(*overrides)).path.name

    base = name()
    for same_run in ("data.threads=3", "data.stage=none", "data.verify=first_use"):
        assert name(same_run) == base
    for other in (
        "data.shuffle=block",
        "data.subset=':100'",
        "data.balance=label",
        "data.window=3",
    ):
        assert name(other) != base
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in digits.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    mixed = [name(f"data.mixture=[{{name: a, path: {path}}}]") for path in (digits, copy)]
    assert mixed[0] == mixed[1] != base
