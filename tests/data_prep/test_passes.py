"""A conversion splits by class, by a column or by file, and sees the same samples twice."""

import os
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from data_prep.source import SampleBlock
from data_prep.writing.commit import PARTIAL
from data_prep.writing.convert import convert
from data_prep.writing.piece import Converter
from hpctrain.errors import ConfigError, DataError
from tests.data_prep import read_back
from tests.data_prep.crash import content
from tests.data_prep.hand import Hand, Row, hand, options

SPLIT = "a=0.5,b=0.5"


def values(out, split, field="x"):
    return read_back.rows(out, split)[field].tolist()


class Fickle(Hand):
    """A source that yields more samples when it is read a second time."""

    def read(self, what, reading):
        SEEN.append(what)
        for _ in SEEN:
            yield from super().read(what, reading)


SEEN = []


def test_a_source_that_is_not_the_same_twice(tmp_path):
    source = hand([Row(1), Row(2)])
    fickle = Fickle(**{each.name: getattr(source, each.name) for each in fields(source)})
    with pytest.raises(DataError, match=r"gave 2 samples of piece 0 at first and 4 the second"):
        convert(fickle, tmp_path / "OUT", options(SPLIT, stratify="label"))
    assert not (tmp_path / "OUT").exists()  # the results of the first pass are removed


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "fifo", "link"])
def test_damage_of_what_the_first_pass_saw(tmp_path, damage):
    out, chosen = tmp_path / "OUT", options(SPLIT, stratify="label")
    source = hand([Row(1)], [Row(2)], [Row(3)])
    looks = tmp_path / "OUT" / PARTIAL / "looks"
    with pytest.MonkeyPatch.context() as patch:  # the second pass is interrupted
        patch.setattr(Converter, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, chosen)
    path = looks / "00000.npz"
    content = path.read_bytes()
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage == "link":
        path.symlink_to("00001.npz")
    else:
        path.write_bytes({"cut": content[:-30], "empty": b"", "other": b"PK but no zip"}[damage])
    with pytest.raises(DataError) as caught:
        convert(source, out, chosen)
    assert str(caught.value).startswith(f"{path} is damaged (")
    assert str(caught.value).endswith("): remove it, and give the command again")
    path.unlink()
    (tmp_path / "mine").write_text("mine")
    (looks.parent / "choice.npy").unlink()  # it is never read again, but made again
    (looks.parent / "choice.npy").symlink_to(tmp_path / "mine")
    convert(source, out, chosen)
    assert (tmp_path / "mine").read_text() == "mine"
    assert sorted(values(out, "a") + values(out, "b")) == [1, 2, 3]


def test_each_class_has_the_same_proportions(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2**62, -5], [100, 37, 10, 1])
    rng.shuffle(labels)
    rows = [Row(float(i), label=int(label)) for i, label in enumerate(labels)]
    source = hand(rows[:60], [], rows[60:61], rows[61:])
    split = "train=0.7,val=0.2,test=0.1"
    index = convert(source, tmp_path / "OUT", options(split, stratify="label"))
    found = {name: Counter(values(tmp_path / "OUT", name, "label")) for name in index.splits}
    assert found["train"] == {0: 70, 1: 26, 2**62: 7, -5: 1}
    assert found["val"] == {0: 20, 1: 7, 2**62: 2}
    assert found["test"] == {0: 10, 1: 4, 2**62: 1}
    samples = [x for name in index.splits for x in values(tmp_path / "OUT", name)]
    assert sorted(samples) == [float(i) for i in range(len(rows))]


def test_equal_keys_stay_together_in_a_class_too(tmp_path):
    rows = [Row(float(i % 11), key=b"%d" % (i % 11)) for i in range(200)]
    convert(hand(rows[:99], rows[99:]), tmp_path / "OUT", options("a=0.5,b=0.5", stratify="label"))
    first, second = (set(values(tmp_path / "OUT", name)) for name in "ab")
    assert first
    assert second
    assert not first & second


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stratify": "x"}, "--stratify 'x': it is a field with one whole number per sample"),
        ({"stratify": "text"}, "there are x float64, label int64, text uint8"),
        ({"stratify": "none"}, "--stratify 'none'"),
        ({"split": "train=1", "stratify": "label"}, "needs fractions to split by; --split is"),
        ({"split": "column:split", "stratify": "label"}, "--split is column:split"),
        ({"split": "column:no"}, "hand has no such column to go by; it has split"),
    ],
)
def test_what_cannot_be_split_by(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        convert(hand([Row(1)]), tmp_path / "OUT", options(**({"split": "a=0.5,b=0.5"} | given)))
    assert not (tmp_path / "OUT").exists()


def test_by_a_column(tmp_path):
    rows = [Row(1, split="train"), Row(2, split="val-2"), Row(3, split="../x"), Row(4, split="")]
    with pytest.raises(DataError, match=r"f0: row 2: column 'split': split '../x': a name has"):
        convert(hand(rows), tmp_path / "OUT", options("column:split"))
    index = convert(hand(rows), tmp_path / "OUT", options("column:split", on_error="skip"))
    assert {name: values(tmp_path / "OUT", name) for name in index.splits} == {
        "train": [1],
        "val-2": [2],
    }
    assert index.provenance["left_out"]["unusable"] == 2


def test_other_byte_orders_and_blocks_give_the_same(tmp_path):
    class Swapped(Hand):
        def read(self, what, reading):
            for block in super().read(what, reading):
                values = dict(block.values)
                values["x"] = values["x"].astype(">f8")
                yield SampleBlock(values, block.keys, block.column, block.file, block.records)

    rows = [Row(float(i), text="é" * i) for i in range(20)]
    source = hand(rows)
    given = options(SPLIT, stratify="label")
    convert(source, tmp_path / "OUT", given)
    swapped = Swapped(**{each.name: getattr(source, each.name) for each in fields(source)})
    convert(swapped, tmp_path / "SWAPPED", given)
    assert content(tmp_path / "OUT") == content(tmp_path / "SWAPPED")
