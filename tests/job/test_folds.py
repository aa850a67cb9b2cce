"""Cross-validation with real digits and a made-up patient: no patient is in both parts."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.shards.index import Index
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import HpctrainError
from hpctrain.runs.freeze import check
from tests.job.feeds import Build, builder, epoch, values
from tests.written import write_shards

FOLDS = 3
FIELDS = ("data.tail=pad", "train.global_batch_size=32")


@pytest.fixture(scope="module")
def patients(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of 40 patients, who have 5 to 60 or so; `sample` is the number of the sample."""
    rows = Reader(digits, "train").read(np.arange(1000))
    random = np.random.default_rng(0)
    weights = random.integers(5, 60, 40)
    patient = random.choice(40, 1000, p=weights / weights.sum()).astype(np.int32)
    folder = tmp_path_factory.mktemp("patients") / "data"
    given = {name: rows[name] for name in ("image", "label")}
    given |= {"patient": patient, "sample": np.arange(1000)}
    write_shards(folder, [("train", given)])
    return folder


@pytest.fixture
def config(composer: Composer, patients: Path, tmp_path: Path) -> Callable[..., Config]:
    def call(*overrides: str) -> Config:
        where = [f"data.path={patients}", f"output_dir={tmp_path}/runs", "tracking=off"]
        return composer.typed(["experiment=digits", *where, *FIELDS, *overrides])

    return call


@pytest.fixture
def build(config: Callable[..., Config]) -> Build:
    return builder(config)


def read(feed: DevicePrefetcher | None) -> list[int]:
    """Return the numbers of all samples of an epoch."""
    return values(epoch(feed), "sample")


@pytest.mark.parametrize("group", [(), ("data.group=patient",)])
def test_each_sample_is_evaluated_once_and_trained_on_in_all_other_folds(
    build: Build, patients: Path, group: tuple[str, ...]
) -> None:
    of = Reader(patients, "train").read(np.arange(1000))["patient"]
    held, leaks = [], 0
    for fold in range(FOLDS):
        builder = build(f"data.fold={fold}/{FOLDS}", *group)
        trained, evaluated = read(builder.training()), read(builder.evaluation())
        assert sorted([*trained, *evaluated]) == list(range(1000))
        assert evaluated == read(builder.in_order(100)) == sorted(evaluated)
        leaks += len({*of[trained]} & {*of[evaluated]})  # type: ignore[index]
        held += evaluated
        assert abs(len(evaluated) - 1000 / FOLDS) <= (15 if group else 1)
        if fold:
            continue
        # Two ranks share it, and all evaluations of a split that is named have the whole of it.
        parts = [build(f"data.fold={fold}/{FOLDS}", *group, rank=r, size=2) for r in range(2)]
        assert sorted(n for part in parts for n in read(part.evaluation())) == evaluated
        assert len(read(builder.evaluation("train"))) == 1000
    assert sorted(held) == list(range(1000))
    assert (leaks == 0) == bool(group)
    other = read(build(f"data.fold=0/{FOLDS}", *group, "seed=1").evaluation())
    assert other != held[: len(other)]


def test_the_data_set_may_know_its_group(
    build: Build, patients: Path, tmp_path: Path, config: Callable[..., Config]
) -> None:
    index = Index.load(patients)
    for path in patients.glob("*.h5"):
        (tmp_path / path.name).hardlink_to(path)
    Index(index.fields, index.shards, index.statistics, group="patient").save(tmp_path)
    own = read(build("data.fold=2/5", f"data.path={tmp_path}").evaluation())
    assert own == read(build("data.fold=2/5", "data.group=patient").evaluation())
    # Other folds are another run; without folds it is the same data.
    for more, same in (("data.fold=2/5", False), ("data.val_split=null", True)):
        names = {check(config(more, f"data.path={path}")).name for path in (patients, tmp_path)}
        assert (len(names) == 1) == same


def test_a_part_of_the_patients(build: Build, patients: Path) -> None:
    of = np.asarray(Reader(patients, "train").read(np.arange(1000))["patient"])
    first = [*dict.fromkeys(of.tolist())][:6]
    part = ("data.subset=:6", "data.group=patient", "data.val_split=null")
    wanted = np.flatnonzero(np.isin(of, first)).tolist()
    assert sorted(read(build(*part).training())) == wanted
    # With folds, the fold is of the whole split, and the training has the rest of the part.
    fold = build("data.fold=1/5", *part)
    evaluated = read(fold.evaluation())
    assert evaluated == read(build("data.fold=1/5", "data.group=patient").evaluation())
    assert sorted(read(fold.training())) == sorted({*wanted} - {*evaluated})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("data.fold=5/5", "data.fold='5/5': it must be K/N: fold K, from 0 to N - 1, of"),
        ("data.fold=0/1", "data.fold='0/1': it must be K/N"),
        ("data.fold=first", "data.fold='first': it must be K/N"),
        ("data.fold=0/1001", "data.fold=0/1001: the split 'train' has 1000 samples; at most so"),
        ("data.fold=0/41 data.group=patient", "has 40 values of patient; at most so many folds"),
        ("data.fold=0/5 data.group=person", "data.group=person: the fields of data.path are image"),
        ("data.fold=0/5 train.global_batch_size=900 data.tail=drop", "fold=0/5 has 800 samples"),
        (
            "data.fold=0/5 data.val_sets=[{name:a,split:train}]",
            "the training split has the samples of both",
        ),
        ("data.group=patient data.val_split=null", "it is for data.fold or data.subset"),
        ("data.group=patient data.subset=x.npy data.val_split=null", "the file lists samples"),
        ("data.subset=all data.group=patient data.val_split=null", "'all' is no slice"),
        ("data.fold=0/5 data.windows.field=label", "windows of one document would be in two"),
        ("data.fold=0/5 data.mixture=[{name: a, path: b}]", "it divides one training split"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_queued(
    config: Callable[..., Config], overrides: str, words: str
) -> None:
    with pytest.raises(HpctrainError) as error:
        check(config(*re.split(r" (?=data|train)", overrides)))
    assert words in str(error.value)
