"""A conversion that is killed at any moment and started again writes the same bytes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from data_prep.writing.commit import PARTIAL
from data_prep.writing.convert import convert
from data_prep.writing.job import Conversion
from hpctrain.data.shards.index import Index
from hpctrain.errors import DataError, StorageError
from tests import forkserver
from tests.conftest import ignoring_sigint
from tests.data_prep.crash import content
from tests.data_prep.hand import Row, hand, options

COMMAND = [sys.executable, "-m", "data_prep"]
CRASH = Path(__file__).with_name("crash.py")


@pytest.fixture
def small(tmp_path):
    """Write a source of two pieces in which some samples occur twice, and return its files."""
    np.save(tmp_path / "x.npy", np.arange(400.0).reshape(-1, 4) % 90)
    np.save(tmp_path / "y.npy", np.arange(100) % 3)
    return [str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]


SIZES = ("--shard-size", "2KB", "--workers", "1")
SPLIT = ("--split", "train=0.5,val=0.5")


@pytest.mark.parametrize(
    ("setup", "last", "every"),
    [
        pytest.param([], [*SPLIT], 1, id="new", marks=pytest.mark.slow),
        pytest.param([[]], [*SPLIT, "--overwrite"], 5, id="replaces"),
        pytest.param([[]], [*SPLIT, "--overwrite"], 1, id="replaces-each", marks=pytest.mark.slow),
        pytest.param([], [*SPLIT, "--stratify", "y"], 1, id="two-passes", marks=pytest.mark.slow),
        pytest.param(
            [[*SPLIT, "--part", "1/2"]],
            [*SPLIT, "--part", "2/2"],
            1,
            id="last-part",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_killed_at_each_change_of_the_disk(tmp_path, small, data_prep, setup, last, every):
    words = ["arrays", *small, "OUT", *SIZES, "--quiet"]
    whole = [word for word in last if word not in ("--part", "2/2")]
    reference = tmp_path / "reference"
    assert data_prep("arrays", *small, reference, *SIZES, *whole)[0] == 0
    commands = [[*words, *more] for more in (*setup, last)]
    # Hundreds of conversions call fsync, which is faster in memory than on a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        done = subprocess.run(
            [sys.executable, CRASH, Path(folder, "OUT"), reference, str(every)],
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def start(tmp_path, *more, rows=40_000, wait_for=3):
    """Start a conversion of 160 pieces, and wait until `wait_for` pieces are finished.

    Return the process and its command.
    """
    if not (tmp_path / "x.npy").exists():
        np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (rows, 1000)).flush()
    words = ["arrays", tmp_path / "x.npy", tmp_path / "OUT", "--shard-size", "1MB", *more]
    command = [*COMMAND, *map(str, words)]
    process = forkserver.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait(lambda: len(pieces(tmp_path)) >= wait_for or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return process, command


def pieces(tmp_path):
    folder = tmp_path / "OUT" / PARTIAL / "pieces"
    return [path for path in folder.glob("*") if path.name.isdigit()] if folder.exists() else []


def wait(until):
    end = time.monotonic() + 120
    while not until():
        assert time.monotonic() < end
        time.sleep(0.005)


def workers(process):
    """Return the process ids of the worker processes."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def alive(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_worker_outlives_a_killed_parent(tmp_path):
    process, command = start(tmp_path, "--workers", "2")
    started = workers(process)
    assert len(started) == 2
    os.kill(process.pid, signal.SIGKILL)
    assert "leaked" not in process.communicate(timeout=60)[1]
    wait(lambda: not any(map(alive, started)))
    assert os.listdir(tmp_path / "OUT") == [PARTIAL]
    there = len(pieces(tmp_path))
    command = [*command, "--workers", "1"]  # the last one counts
    done = forkserver.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "40000 samples" in done.stdout
    assert f"goes on, {there} of 160 pieces are there" in done.stderr
    Index.load(tmp_path / "OUT").check(tmp_path / "OUT")
    assert PARTIAL not in os.listdir(tmp_path / "OUT")


def test_ctrl_c_on_a_terminal_ends_at_once_with_one_line(tmp_path):
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (40_000, 1000)).flush()
    words = ["arrays", tmp_path / "x.npy", tmp_path / "OUT", "--shard-size", "1MB"]
    for moment in (0, 3):  # once while the workers start, once later
        controller, terminal = os.openpty()
        # Also where the shell that started the command has had Ctrl-C ignored.
        with ignoring_sigint() if moment else nullcontext():
            process = subprocess.Popen(
                ["setsid", "--ctty", *COMMAND, *words, "--workers", "2"],
                stdin=terminal,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        os.close(terminal)
        wait(lambda: (tmp_path / "OUT" / PARTIAL / "job.json").exists())
        before = len(pieces(tmp_path))
        wait(lambda: len(pieces(tmp_path)) >= before + moment)  # noqa: B023
        os.write(controller, b"\x03")

        out, err = process.communicate(timeout=60)
        os.close(controller)
        # Where Ctrl-C meets code that a library makes from text, such as a named tuple, Python ends
        # itself by SIGINT after all, although the exception was caught. A shell shows 130 for both.
        assert process.returncode in (130, -signal.SIGINT), err
        lines = [line for line in err.splitlines() if "goes on, " not in line]
        assert (out, lines) == ("", ["data_prep: interrupted; the same command goes on"])
        assert len(pieces(tmp_path)) < 160  # the workers did not go on to the end


def test_finished_pieces_of_another_command_are_not_lost(tmp_path):
    out = tmp_path / "OUT"
    rows = [Row(1), Row(2)]
    with pytest.raises(DataError, match="no good"):
        convert(hand(rows, [Row(3, bad="no good")]), out, options())
    assert len(pieces(tmp_path)) == 1
    other = hand(rows, [Row(3)], act="other")
    with pytest.raises(DataError) as caught:
        convert(other, out, options("train=0.5,val=0.5"))
    assert str(caught.value) == (
        f"{out} holds 1 finished pieces of an interrupted command, of another source or with "
        "other options: it; --overwrite removes them"
    )
    assert len(pieces(tmp_path)) == 1
    index = convert(other, out, options("train=0.5,val=0.5", overwrite=True))
    assert index is not None
    assert sum(shard.count for shard in index.shards) == 3


def test_after_a_bad_record_skip_goes_on_and_stop_does_not_take_its_pieces(tmp_path):
    out = tmp_path / "OUT"
    source = hand([Row(1)], [Row(2), Row(3, bad="no good")], [Row(4, bad="worse")])
    with pytest.raises(DataError, match="no good"):
        convert(source, out, options())
    first = (out / PARTIAL / "pieces" / "00000" / "piece.json").stat().st_mtime_ns
    with Conversion(out) as job:
        job.load()
        assert job.pieces.done() == {0}
    before = first, (out / PARTIAL / "pieces" / "00000" / "train-00000.h5").stat().st_ino
    index = convert(source, out, options(on_error="skip"))
    assert index is not None
    assert (out / "train-00000.h5").stat().st_ino == before[1]
    assert index.provenance["left_out"]["unusable"] == 2
    assert convert(source, out, options(on_error="skip")) is not None
    with pytest.raises(DataError, match="without 2 records that could not be used; --overwrite"):
        convert(source, out, options())


def test_the_disk_is_full_in_the_middle_and_has_room_again(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    out = tmp_path / "OUT"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(out)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not mount a tmpfs")
    try:
        parts = [[Row(number, text="much " * 2000)] * 3 for number in range(12)]
        for workers in (1, 2):
            with pytest.raises(StorageError, match=r"cannot write .*No space left on device"):
                convert(hand(*parts, nbytes=1), out, options(workers=workers))
        assert 0 < len(pieces(tmp_path)) < 12
        assert not list((out / PARTIAL / "pieces").glob(".*"))
        with pytest.raises(StorageError, match=r"1\.0 PB are to be written, \S+ kB are free"):
            convert(hand(*parts, nbytes=10**14), out, options(overwrite=True))
        subprocess.run(["mount", "-o", "remount,size=9m", str(out)], check=True)
        convert(hand(*parts, nbytes=1), out, options())
        convert(hand(*parts, nbytes=1), tmp_path / "REF", options())
        assert content(out) == content(tmp_path / "REF")
    finally:
        subprocess.run(["umount", "--lazy", str(out)], check=True)
