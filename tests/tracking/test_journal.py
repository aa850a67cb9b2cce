"""Tests of the journal: records, damaged lines, rewinding and full disks."""

import errno
import json
import math
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.commands import sync as sync_module
from hpctrain.errors import StorageError, TrackingError
from hpctrain.tracking import columns, samples
from hpctrain.tracking.final_status import is_open
from hpctrain.tracking.journal import Journal, journal_path, last_record, read, read_all
from hpctrain.tracking.journal_line import encode


def bodies(run_dir: Path) -> list[dict[str, object]]:
    return [record.body for record in read_all(journal_path(run_dir))]


def test_a_record_is_a_line_and_its_position_its_identity(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert (journal.attempt, journal.position) == (1, 0)
    journal.append("metrics", step=1, metrics={"loss": 0.1})
    after_one = journal.position
    journal.append("tags", tags={"a": "ü\n"})
    records, end = read(journal.path)
    assert [record.start for record in records] == [0, after_one]
    assert end == journal.position == journal.path.stat().st_size == records[-1].end
    assert len(journal.path.read_text().splitlines()) == 2
    assert records[0].body["metrics"] == {"loss": 0.1}
    assert read(journal.path, after_one)[0] == records[1:]
    journal.close()
    journal.close()


def test_reading_a_piece_at_a_time_gives_the_same(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in range(100):
        journal.append("metrics", step=step, metrics={"loss": 1.0})
    journal.close()
    whole, end = read(journal.path)
    pieces, position = [], 0
    while position < end:
        records, position = read(journal.path, position, limit=150)
        assert 1 <= len(records) <= 3
        pieces += records
    assert pieces == whole
    assert list(read_all(journal.path, whole[10].start, whole[20].start)) == whole[10:20]


@pytest.mark.parametrize("size", [200_000_000, 1 << 35])
def test_a_hole_is_no_line(tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    """A crash of the machine may leave zeros. Without a limit they would fill the memory."""
    path = journal_path(tmp_path)
    for step in (1, 2):
        journal = Journal(tmp_path)
        assert journal.attempt == step
        journal.append("metrics", step=step, metrics={"x" * 50: 1.0})
        journal.close()
        begin = path.stat().st_size
        os.truncate(path, begin + size)
        if size < 1 << 30:  # an area of a disk, not only a hole
            with path.open("r+b") as file:
                file.seek(begin)
                file.write(bytes(20_000_000))
    found = last_record(path, "metrics")
    assert (found or {})["step"] == 2
    assert last_record(path, "device_s") is None
    first, second = read_all(path)
    assert (first.body["step"], second.body["step"]) == (1, 2)
    assert second.start == first.end + size + 1
    said = f"{path}: the line that begins at byte {first.end:,} has {size + 1:,} bytes"
    assert caplog.text.count(said) == 1
    node = samples.folder(tmp_path) / "n.jsonl"
    node.parent.mkdir()
    node.write_bytes(b'{"number": 0, "time": 1, "metrics": {"a": 1}}\n')
    os.truncate(node, size)
    with node.open("ab") as file:
        file.write(b'\n{"number": 1, "time": 2, "metrics": {"a": 1}}\n')
    one, two = samples.read(node)
    assert (one.number, two.number, two.end) == (0, 1, node.stat().st_size)
    assert [*samples.read(node, 99)] == [two]


def test_a_torn_line_is_closed_and_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("metrics", step=1, metrics={"loss": 1.0})
    whole = journal.position
    journal.append("metrics", step=2, metrics={"loss": 1.0})
    journal.close()
    os.truncate(journal.path, journal.path.stat().st_size - 9)
    # An incomplete line is not read, because its writer may not have finished.
    assert read(journal.path)[1] == whole
    again = Journal(tmp_path)
    assert again.attempt == 2
    again.append("metrics", step=3, metrics={"loss": 1.0})
    again.close()
    assert [body["step"] for body in bodies(tmp_path)] == [1, 3]


@pytest.mark.parametrize("garbage", [b"\0" * 5000 + b"\n", b"17\n", b"{}\n", b"\xff\xfe\n", b"\n"])
def test_garbage_is_skipped(tmp_path: Path, garbage: bytes) -> None:
    journal = Journal(tmp_path)
    journal.append("metrics", step=1, metrics={})
    journal.close()
    with journal.path.open("ab") as file:
        file.write(garbage * 3)
    again = Journal(tmp_path)
    again.append("metrics", step=2, metrics={})
    again.close()
    assert [(body["attempt"], body["step"]) for body in bodies(tmp_path)] == [(1, 1), (2, 2)]


def test_the_attempt_is_found_before_a_long_last_record(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        journal = Journal(tmp_path)
        assert journal.attempt == attempt
        journal.append("params", params={"long": "x" * 300_000})
        journal.close()
    assert [record.end - record.start > 300_000 for record in read(journal.path)[0]] == [True] * 3


@given(st.floats())
def test_every_float_survives(value: float) -> None:
    back = float(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_rewind_marks_and_cuts_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    journal.append("metrics", step=1, metrics={})
    position = journal.position
    journal.rewind(position)
    assert journal.position == position
    journal.append("metrics", step=2, metrics={})
    end = journal.position
    journal.rewind(position)
    body = bodies(tmp_path)[-1]
    assert (body["kind"], body["from"], body["to"]) == ("superseded", position, end)
    assert len(bodies(tmp_path)) == 3
    journal.rewind(10**9)
    assert "before position 1000000000" in caplog.text
    journal.close()


def test_a_full_disk_delays_records_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    write = os.write

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal.append("metrics", step=0, metrics={})
    monkeypatch.setattr(os, "write", refuse)
    for step in (1, 2, 3):
        journal.append("metrics", step=step, metrics={})
    position = journal.position
    assert len(caplog.records) == 1
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    journal.append("metrics", step=4, metrics={})
    monkeypatch.undo()
    assert [body["step"] for body in bodies(tmp_path)] == [0, 1, 2, 3, 4]
    assert read(journal.path)[0][-1].start == position
    journal.close()


def test_after_close_nothing_is_written_anywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.close()
    with (tmp_path / "innocent").open("wb") as innocent:  # likely gets the same descriptor
        journal.append("metrics", step=1, metrics={})
        journal.sync()
        assert innocent.tell() == 0
    assert (tmp_path / "innocent").read_bytes() == b""
    assert "after the end" in caplog.text


def test_the_timer_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.set())
    journal = Journal(tmp_path, fsync_every=0.05)
    assert not synced.wait(0.2)  # nothing to do
    journal.append("metrics", step=1, metrics={})
    assert synced.wait(60)
    journal.close()


def test_a_place_that_cannot_hold_a_journal(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(StorageError, match="journal"):
        Journal(tmp_path)


def test_sync_closes_open_runs_whose_jobs_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_module, "sync", lambda run_dirs, *_: 0)
    runs = [tmp_path / name for name in ("open", "done", "gone")]
    for run in runs:
        journal = Journal(run)
        journal.append("status", status="RUNNING", host="elsewhere", pid=1, started=2)
        if run.name == "done":
            journal.append("status", status="FINISHED", reason="")
        journal.close()
    asked = []

    def ended(paths: list[Path]) -> dict[Path, tuple[str, str]]:
        asked.extend(paths)
        return {runs[2]: ("KILLED", "lost: NODE_FAIL")}

    monkeypatch.setattr(sync_module, "ended_for_good", ended)
    assert sync_module.main([*map(str, runs)]) == 0
    assert asked == [runs[0], runs[2]]
    assert [is_open(run) for run in runs] == [True, False, False]
    last = last_record(journal_path(runs[2]), "reason")
    assert last is not None
    assert (last["attempt"], last["status"], last["reason"]) == (1, "KILLED", "lost: NODE_FAIL")


def test_sync_finds_the_runs_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ["runs/a", "runs/b"]
    for run in (*made, "runs/a/artifacts/run", "runs/code/0123/tests/corpus/run"):
        (tmp_path / run / "journal").mkdir(parents=True)
        (tmp_path / run / "journal" / "meta.json").touch()
    found: list[list[str]] = []
    monkeypatch.setattr(sync_module, "sync", lambda dirs, *_: found.append([*map(str, dirs)]))
    monkeypatch.chdir(tmp_path)
    for words in ([], ["runs"], ["runs/a", "runs/other"]):
        sync_module.main(words)
    assert found == [made, made, ["runs/a", "runs/other"]]


def test_metrics_as_columns(tmp_path: Path) -> None:
    """Superseded metrics are left out, and of a step with a key twice the later value counts."""
    journal = Journal(tmp_path)
    ends = []
    for step in range(6):
        journal.append("metrics", step=step, metrics={"b/loss": step / 2, "a": "nan"})
        ends.append(journal.position)
    journal.rewind(ends[3])
    journal.append("metrics", step=4, metrics={"b/loss": 40.0})
    journal.append("metrics", step=4, metrics={"b/loss": 41.0})
    journal.append("metrics", step=0, metrics={"c": "inf"})
    journal.append("superseded", **{"from": ends[0], "to": ends[1]})
    journal.append("superseded", **{"from": 10**9, "to": 2 * 10**9})
    journal.close()
    steps, keys, values = columns.read(journal.path)
    assert (steps.dtype, values.dtype) == ("int64", "float64")
    found = list(zip(steps.tolist(), keys.tolist(), map(repr, values.tolist()), strict=True))
    assert found == [
        *((0, "a", "nan"), (0, "b/loss", "0.0"), (0, "c", "inf")),
        *((2, "a", "nan"), (2, "b/loss", "1.0"), (3, "a", "nan"), (3, "b/loss", "1.5")),
        (4, "b/loss", "41.0"),
    ]
    assert [len(column) for column in columns.read(tmp_path / "absent")] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_trap_in_place_of_a_journal_has_no_records(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal" / "events.jsonl"
    path.parent.mkdir()
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert [*read_all(path)] == []
    assert last_record(path, "step") is None
    with pytest.raises(TrackingError, match="it is"):
        sync_module._check_journal(path)
    (said,) = {record.getMessage() for record in caplog.records}
    assert said.startswith(f"{path}: it cannot be read (it is ")
