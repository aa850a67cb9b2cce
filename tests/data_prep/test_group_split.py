"""`--group` keeps the samples of a patient in one split, whatever the source."""

import re

import numpy as np
import pytest

from data_prep.writing.convert import convert
from hpctrain.data.shards.index import Index
from hpctrain.errors import ConfigError, DataError
from tests.data_prep import read_back
from tests.data_prep.hand import Row, hand, options

RANDOM = np.random.default_rng(0)
PATIENTS = RANDOM.choice(40, 600, p=RANDOM.permutation(np.arange(1, 41)) / 820)
SPLIT = ("--split", "train=0.8,val=0.2")


def shares(folder, field="patient"):
    """Return the values of a field in each split."""
    splits = Index.load(folder).splits
    return {name: read_back.rows(folder, name)[field].reshape(-1) for name in splits}


def is_whole(folder, field="patient"):
    found = shares(folder, field)
    assert {*found} == {"train", "val"}
    size = sum(map(len, found.values()))
    assert abs(len(found["val"]) / size - 0.2) < 0.02
    return not {*found["train"].tolist()} & {*found["val"].tolist()}


@pytest.fixture
def arrays(tmp_path, data_prep):
    """Return a function that converts 600 samples of 40 patients into tmp_path / NAME."""
    np.save(tmp_path / "patient.npy", PATIENTS)
    np.save(tmp_path / "x.npy", np.arange(600.0))
    np.save(tmp_path / "sick.npy", PATIENTS % 4 == 0)

    def call(name, *words, code=0):
        sources = [tmp_path / f"{field}.npy" for field in ("patient", "x", "sick")]
        done = data_prep("arrays", *sources, tmp_path / name, *SPLIT, *words)
        assert done[0] == code, done
        return "".join(done[1:])

    return call


def test_no_patient_is_in_two_splits(tmp_path, arrays, data_prep):
    arrays("leaks")
    assert not is_whole(tmp_path / "leaks")
    said = arrays("OUT", "--group", "patient", "--shard-size", "2KB")
    assert is_whole(tmp_path / "OUT")
    found = shares(tmp_path / "OUT")
    got = [len(found[name]) / 600 for name in ("train", "val")]
    line = f"each patient is in one split: train {got[0]:.4g} (asked 0.8), val {got[1]:.4g} (asked"
    assert line in said
    assert Index.load(tmp_path / "OUT").group == "patient"
    assert "already holds this data set" in arrays(
        "OUT", "--group", "patient", "--shard-size", "2KB"
    )
    # The same command gives the same splits, from shards of any size.
    arrays("again", "--group", "patient")
    assert all(
        sorted(one.tolist()) == sorted(found[name].tolist())
        for name, one in shares(tmp_path / "again").items()
    )
    code, out, _ = data_prep("inspect", tmp_path / "OUT", "--verify")
    assert code == 0
    assert "groups of patient" in out
    code, out, _ = data_prep("inspect", tmp_path / "leaks", "--verify", "--group", "patient")
    assert code == 3
    assert re.search(
        r"\d+ of 40 values of 'patient' are in both 'train' and 'val', such as \d", out
    )
    assert data_prep("inspect", tmp_path / "leaks", "--verify")[0] == 0
    assert data_prep("inspect", tmp_path / "leaks", "--verify", "--group", "person")[0] == 2


def test_groups_beside_classes(tmp_path, arrays):
    arrays("OUT", "--group", "patient", "--stratify", "patient")
    assert is_whole(tmp_path / "OUT")


def test_groups_of_texts_and_of_a_column(tmp_path):
    rows = [Row(float(i), text=f"p{i % 30}", split=f"q{i % 20}") for i in range(240)]
    source = hand(rows[:100], rows[100:])
    convert(source, tmp_path / "text", options("train=0.8,val=0.2", group="text"))
    texts = read_back.as_text(read_back.rows(tmp_path / "text", "val")["text"])
    assert 0 < len({*texts}) < 12
    assert len(texts) == 8 * len({*texts})
    index = convert(source, tmp_path / "column", options("train=0.8,val=0.2", group="split"))
    assert index.group == ""  # it is no field, so nobody can look at it later
    found = {
        name: {int(x) % 20 for x in xs} for name, xs in shares(tmp_path / "column", "x").items()
    }
    assert not found["train"] & found["val"]
    assert len(found["val"]) == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"group": "none"},
            "hand has no such field or column to go by; it has the fields x, label, t",
        ),
        ({"group": "none"}, "and the columns split"),
        ({"group": "label"}, "--split train=0.5,val=0.5: 1 groups are too few for 2 parts"),
    ],
)
def test_what_cannot_be_grouped(tmp_path, given, said):
    with pytest.raises((ConfigError, DataError), match=said):
        convert(hand([Row(1), Row(2)]), tmp_path / "OUT", options("train=0.5,val=0.5", **given))
    assert not (tmp_path / "OUT").exists()


def test_a_part_does_not_see_all_groups(arrays):
    said = arrays("OUT", "--group", "patient", "--part", "1/2", code=2)
    assert "--group has to see all samples, --part only some" in said


def test_repack_keeps_groups_whole(tmp_path, arrays, data_prep):
    arrays("src", "--group", "patient")

    def repack(*words):
        done = data_prep("repack", tmp_path / "src", tmp_path / "new", "--overwrite", *words)
        assert done[0] == 0, done
        return Index.load(tmp_path / "new").group

    assert repack() == repack("--shuffle", "1") == "patient"
    assert is_whole(tmp_path / "new")
    assert repack("--split", "train=0.75,val=0.25") == "patient"
    found = shares(tmp_path / "new")
    assert not {*found["train"].tolist()} & {*found["val"].tolist()}
    assert repack(*SPLIT, "--group", "") == ""
    assert not is_whole(tmp_path / "new")


def test_files_that_are_adopted(tmp_path, data_prep):
    import h5py

    for name, patients in (("a", [1, 1, 2]), ("b", [3, 3]), ("c", [3, 4])):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["p"] = np.array(patients)
    command = ("index", *sorted(tmp_path.glob("*.h5")), "--field", "p=/p")
    verify = ("inspect", tmp_path, "--verify", "--group", "p")
    assert data_prep(*command, "--split", "val=a*,train=*")[0] == 0
    assert data_prep(*verify)[0] == 0
    assert data_prep(*command, "--split", "val=c*,train=*", "--overwrite")[0] == 0
    code, said, _ = data_prep(*verify)
    assert code == 3
    assert "1 of 4 values of 'p' are in both 'train' and 'val', such as 3" in said
