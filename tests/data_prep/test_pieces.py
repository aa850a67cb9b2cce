"""What a conversion keeps of its pieces is checked, and one process at a time writes a folder."""

import fcntl
import os
import shutil

import pytest

from data_prep.writing import commit
from data_prep.writing.commit import PARTIAL
from data_prep.writing.convert import convert
from hpctrain.errors import DataError, StorageError
from tests.data_prep.crash import content
from tests.data_prep.hand import Row, hand, options

ROWS = [[Row(number * 10 + i, text="t" * i) for i in range(5)] for number in range(4)]


@pytest.fixture
def reference(tmp_path):
    convert(hand(*ROWS), tmp_path / "reference", options("train=0.7,val=0.3"))
    return content(tmp_path / "reference")


@pytest.fixture
def begun(tmp_path):
    """Return a folder in which a conversion has ended after two pieces of four, and who goes on."""
    out = tmp_path / "OUT"
    rows = [*ROWS[:2], [Row(0, bad="x")], ROWS[3]]
    with pytest.raises(DataError, match="x; --on-error skip"):
        convert(hand(*rows), out, options("train=0.7,val=0.3"))
    return out, lambda: convert(hand(*ROWS), out, options("train=0.7,val=0.3"))


def test_damaged_pieces_are_not_put_together(begun, reference):
    out, go_on = begun
    folder = out / PARTIAL / "pieces" / "00000"
    piece = folder / "piece.json"
    whole = piece.read_bytes()
    for path, change, said in (
        (folder / "train-00000.h5", lambda old: b"", "is truncated: it has 0 bytes"),
        (folder / "train-00000.h5", None, "train-00000.h5 is missing"),
        (piece, None, "No such file"),
        (piece, lambda old: old[:-9], "piece.json"),
        (piece, lambda old: old.replace(b'"train-00000.h5"', b'"../train.h5"'), "leaves the data"),
        (
            piece,
            lambda old: old.replace(b'"fingerprint": "', b'"fingerprint": "x'),
            "00000 is of another source or of other options than the rest",
        ),
    ):
        before = path.read_bytes()
        path.unlink() if change is None else path.write_bytes(change(before))
        with pytest.raises(DataError, match=said) as caught:
            go_on()
        assert str(caught.value).startswith(str(folder))
        path.write_bytes(before)
    assert piece.read_bytes() == whole
    shutil.rmtree(folder)  # the message says to do this
    go_on()
    assert content(out) == reference
    (out / PARTIAL).mkdir()
    (out / PARTIAL / "commit.json").write_text("{")
    with pytest.raises(DataError, match=r"commit\.json is damaged: what was to be moved into"):
        go_on()


def test_a_damaged_plan_is_refused(begun, reference):
    out, go_on = begun
    plan = out / PARTIAL / "job.json"
    plan.write_bytes(plan.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"job\.json.*; remove .* to begin anew"):
        go_on()
    convert(hand(*ROWS), out, options("train=0.7,val=0.3", overwrite=True))
    assert content(out) == reference


def test_a_file_system_without_locks(tmp_path, reference, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    convert(hand(*ROWS), tmp_path / "OUT", options("train=0.7,val=0.3"))
    assert content(tmp_path / "OUT") == reference


def test_locks(tmp_path):
    first = commit.lock(tmp_path)
    with pytest.raises(StorageError, match="another process is writing"):
        commit.lock(tmp_path)
    assert commit.holds(tmp_path, first)
    commit.discard(tmp_path)
    second = commit.lock(tmp_path)  # the folder's lock is a new file
    assert not commit.holds(tmp_path, first)
    assert commit.holds(tmp_path, second)
    for descriptor in (first, second):
        commit.unlock(descriptor)
    assert os.listdir(tmp_path) == [PARTIAL]
    commit.settle(tmp_path)
    assert os.listdir(tmp_path) == []
