"""Tests staging with real folders, real processes and real kills."""

import errno
import fcntl
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.addons.node import node_folder
from hpctrain.addons.node.stage import Stage
from hpctrain.base.files import lock
from hpctrain.data.places import origin
from hpctrain.data.places.placement import load_index
from hpctrain.data.shards.index import Shard
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import DataError, StorageError
from tests.data.store import FaultyStore
from tests.written import write_shards

SHARD = 2**16  # bytes of data in a shard


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write a data set with eight shards of random bytes, and return its folder."""
    folder = tmp_path_factory.mktemp("source") / "set"
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 256, (64, SHARD // 8), dtype=np.uint8)
    write_shards(folder, [("train", {"x": samples})], max_bytes=SHARD)
    return folder


@pytest.fixture
def shards(source):
    found = load_index(source).shards
    assert len(found) == 8
    return found


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "node"
    folder.mkdir()
    return folder


@pytest.fixture
def faulty(source, monkeypatch):
    """Return the URL of the source in a store whose reads can fail; see `set_fault`."""
    monkeypatch.setattr(FaultyStore, "fault", FaultyStore.fault)
    monkeypatch.setattr(origin, "RETRY_S", (0.01, 0.01, 0.01, 0.01))
    return f"faulty://{source}"


def set_fault(function):
    """Make the store pass what it reads through `function(path, position, data)`."""
    FaultyStore.fault = staticmethod(function)


def right(path, shard):
    """Return whether the file has the digest of the shard."""
    return xxhash.xxh3_128_hexdigest(Path(path).read_bytes()) == shard.digest[9:]


def staged(folder):
    """Return the names of the copies, finished or not."""
    return {path.name for path in Path(folder).iterdir()} - {"lock", "room"}


def size_of(path):
    """Return the bytes of a copy; 0 if it was renamed or removed since it was listed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def python(code, *arguments, **env):
    """Start a Python process that runs `code`; its stdout is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


@pytest.mark.parametrize("budget", [3, 100])
def test_a_reader_of_copies_reads_the_same(source, shards, base, budget):
    plain = Reader(source, "train")
    with closing(Stage(source, base, budget_bytes=budget * shards[0].bytes)) as stage:
        copies = Reader(source, "train", place=stage)
        indices = np.random.default_rng(0).permutation(64)
        assert np.array_equal(copies.read(indices)["x"], plain.read(indices)["x"])
        assert len(staged(stage.folder)) == min(budget, 8)


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(0, 9),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("path"), st.integers(0, 7)),
            st.tuples(st.just("plan"), st.permutations(range(8)).map(lambda p: p[:4])),
            st.tuples(st.just("again"), st.none()),
        ),
        max_size=25,
    ),
)
def test_any_calls_give_right_bytes_within_the_budget(source, budget, steps):
    shards = load_index(source).shards
    size = max(shard.bytes for shard in shards)
    with tempfile.TemporaryDirectory() as name:
        stage = Stage(source, Path(name), budget_bytes=budget * size)
        in_use = {}
        for what, argument in steps:
            if what == "path":
                path = stage.path(shards[argument])
                assert right(path, shards[argument])
                in_use[argument] = path
            elif what == "plan":
                stage.plan([shards[number] for number in argument])
            else:
                stage.close()
                stage = Stage(source, Path(name), budget_bytes=budget * size)
                in_use = {}
            assert sum(map(size_of, stage.folder.iterdir())) <= budget * size
            assert all(path.exists() for path in in_use.values())
        stage.close()


# Several processes

STAGE_ALL = """
    import sys, time
    from pathlib import Path
    import tests.data.store
    from hpctrain.data.places.placement import load_index
    from hpctrain.addons.node.stage import Stage
    source, base = sys.argv[1:3]
    shards = load_index(source).shards
    stage = Stage(source, Path(base))
    print("ready", flush=True)
    while not Path(base, "go").exists():
        time.sleep(0.001)
    stage.plan(shards)
    for shard in shards:
        stage.path(shard)
    print(stage.copied_bytes, flush=True)
    time.sleep(float(sys.argv[3]))
"""


def test_processes_that_stage_at_once_read_each_shard_once(source, shards, base, tmp_path):
    log = tmp_path / "log"
    several = [
        python(STAGE_ALL, f"faulty://{source}", base, 0, STORE_LOG=str(log)) for _ in range(3)
    ]
    for process in several:
        assert process.stdout.readline() == "ready\n"
    log.unlink()  # the log has a line for the index
    (base / "go").touch()
    copied = [int(process.communicate(timeout=60)[0]) for process in several]
    assert sum(copied) == sum(shard.bytes for shard in shards)
    assert sorted(log.read_text().split()) == [shard.path for shard in shards]
    assert [process.returncode for process in several] == [0, 0, 0]


SLOW = """
    import sys, time
    from pathlib import Path
    from tests.data.store import FaultyStore
    from hpctrain.data.places.placement import load_index
    from hpctrain.data.places import origin
    origin.BLOCK = 2**14
    from hpctrain.addons.node.stage import Stage
    source, base, seconds = sys.argv[1:]
    shard = load_index(source).shards[0]
    def slow(path, position, data):
        if position:
            print("copying", flush=True)
            time.sleep(float(seconds))
        return data
    FaultyStore.fault = staticmethod(slow)
    Stage(source, Path(base)).path(shard)
    print("done", flush=True)
"""


def test_after_kill_9_during_a_copy_another_process_takes_over(source, shards, base):
    process = python(SLOW, f"faulty://{source}", base, 60)
    assert process.stdout.readline() == "copying\n"
    with closing(Stage(source, base)) as stage:
        (part,) = staged(stage.folder)
        assert part.endswith(".part")
        other = ThreadPoolExecutor(1).submit(stage.path, shards[0])
        time.sleep(0.3)
        assert not other.done()
        process.kill()
        process.communicate()
        assert right(other.result(timeout=60), shards[0])
        assert stage.copied_bytes == shards[0].bytes
        assert staged(stage.folder) == {shards[0].digest[9:]}


@pytest.mark.parametrize("job", ["1", "2"])
def test_who_was_killed_leaves_copies_to_its_own_job_only(source, shards, base, monkeypatch, job):
    (base / "go").touch()
    process = python(STAGE_ALL, source, base, 60, SLURM_JOB_ID="1")
    process.stdout.readline()
    process.stdout.readline()
    (folder,) = base.glob("hpctrain-*-1-*")
    with closing(Stage(source, base)):
        assert len(staged(folder)) == 8, "it lives"
    process.kill()
    process.communicate()
    monkeypatch.setenv("SLURM_JOB_ID", job)
    with closing(Stage(source, base)) as stage:
        assert folder.exists() == (stage.folder == folder) == (job == "1")
        assert right(stage.path(shards[0]), shards[0])
        assert stage.copied_bytes == (0 if job == "1" else shards[0].bytes)
    assert list(base.iterdir()) == [base / "go"]


def test_no_thread_is_left_after_close(source, shards, base):
    stage = Stage(source, base)
    stage.plan(shards)
    stage.close()
    stage.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("hpctrain-stage")]
    with pytest.raises(RuntimeError, match="closed"):
        stage.path(shards[0])


def test_a_fork_and_a_pickle_have_their_own_state(source, shards, base):
    stage = Stage(source, base)
    stage.plan(shards)
    stage.path(shards[0])
    child = os.fork()
    if child == 0:
        good = all(right(stage.path(shard), shard) for shard in shards)
        stage.close()
        os._exit(not good)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stage.path(shards[0]).exists()
    with open(stage.folder / "lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the child's end has not dropped ours
    twin = pickle.loads(pickle.dumps(stage))
    assert twin.path(shards[0]) == stage.path(shards[0])
    twin.close()
    stage.close()


def test_a_fork_of_any_moment_keeps_no_lock(source, shards, base, monkeypatch):
    children = []

    def fork(descriptor):  # when a file is open, and not yet one that forks lose
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)

    monkeypatch.setattr(lock, "keep_private", fork)
    monkeypatch.setattr(node_folder, "_nap", lambda: pytest.fail("a fork holds the lock"))
    try:
        with closing(Stage(source, base)) as stage:
            assert all(right(stage.path(shard), shard) for shard in shards[:2])
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# Room


def test_shards_that_do_not_fit_are_read_from_the_source_with_one_warning(
    source, shards, base, caplog
):
    with closing(Stage(source, base, budget_bytes=3 * shards[0].bytes)) as stage:
        stage.plan(shards)
        paths = [stage.path(shard) for shard in shards]
        assert all(map(right, paths, shards))
        assert len(staged(stage.folder)) == 3
        assert sum(path.parent == source for path in paths) == 5
    (warning,) = warnings_of(caplog)
    assert "is full. From now on what is not staged is read from" in warning


def test_a_url_needs_room_for_all_shards(faulty, shards, base):
    with closing(Stage(faulty, base, budget_bytes=2 * shards[0].bytes)) as stage:
        stage.plan(shards[:2])
        wait_until(lambda: stage.copied_bytes == 2 * shards[0].bytes)
        assert all(right(stage.path(shard), shard) for shard in shards[:2])
        with pytest.raises(StorageError) as error:
            stage.path(shards[7])
        assert "iB, or the disk, is full; and" in str(error.value)
        assert f"{faulty} cannot be read in place" in str(error.value)


# Wrong bytes, failing reads


def test_wrong_bytes_are_an_error_with_both_digests(faulty, shards, base):
    set_fault(lambda path, position, data: data[:-1] + b"?" if data else data)
    with closing(Stage(faulty, base)) as stage:
        with pytest.raises(DataError) as error:
            stage.path(shards[3])
        assert f"{faulty}/train-00003.h5 is changed: its digest is xxh3_128:" in str(error.value)
        assert f"lists {shards[3].digest}" in str(error.value)
        assert staged(stage.folder) == set()
        set_fault(lambda path, position, data: data)
        assert right(stage.path(shards[3]), shards[3])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_flaky_read_is_repeated(faulty, shards, base, number, caplog, monkeypatch):
    monkeypatch.setattr(origin, "BLOCK", 2**14)
    failed = []

    def flaky(path, position, data):
        if position == 2**15 and len(failed) < 3:
            failed.append(path)
            raise OSError(number, os.strerror(number))
        return data

    set_fault(flaky)
    with closing(Stage(faulty, base)) as stage:
        assert right(stage.path(shards[0]), shards[0])
    assert len(failed) == 3
    assert f"bytes 32768 to 49152: OSError({number}, " in caplog.text


def test_a_read_that_keeps_failing_is_an_error_with_its_bytes(faulty, shards, base, monkeypatch):
    monkeypatch.setattr(origin, "BLOCK", 2**14)

    def broken(path, position, data):
        if position == 2**15:
            raise OSError(errno.EIO, "what")
        return data

    set_fault(broken)
    with closing(Stage(faulty, base)) as stage:
        with pytest.raises(DataError, match=r"train-00000.h5: bytes 32768 to 49152 cannot be read"):
            stage.path(shards[0])
        assert staged(stage.folder) == set()


def test_missing_truncated_longer_and_odd_shards(source, shards, base, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    content = (source / shards[1].path).read_bytes()
    (broken / shards[1].path).write_bytes(content[:-1])
    (broken / shards[2].path).write_bytes(content + b"?")
    (broken / shards[3].path).mkdir()
    odd = Shard("odd.h5", "train", 1, 1, "sha256:../../0")
    with closing(Stage(broken, base)) as stage:
        for shard, words in [
            (shards[0], "is missing; index.json lists it"),
            (shards[1], f"is truncated: it has {shards[1].bytes - 1} bytes"),
            (shards[2], "is changed: it has more than the"),
            (shards[3], "cannot be read: Is a directory"),
            (odd, "has the digest 'sha256:../../0'"),
        ]:
            with pytest.raises(DataError, match=words):
                stage.path(shard)
        assert staged(stage.folder) == set()


# The folder of the copies fails


@pytest.fixture
def little_disk(base):
    """Mount a file system of one megabyte at `base`."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "none", base], capture_output=True
    )
    if made.returncode:
        pytest.skip("cannot mount a file system here")
    yield base
    subprocess.run(["umount", "--lazy", base], check=True)


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_full_disk(source, shards, little_disk, caplog):
    with closing(Stage(source, little_disk, budget_bytes=2**40)) as stage:
        stage.path(shards[0])
        (little_disk / "of somebody else").write_bytes(bytes(850_000))
        assert stage.path(shards[0]).parent == stage.folder
        for shard in shards[1:]:
            assert right(stage.path(shard), shard)
    assert len(warnings_of(caplog)) == 1
    assert os.statvfs(little_disk).f_bavail > 0, "not filled"


def test_a_folder_that_disappears(source, shards, base, caplog):
    with closing(Stage(source, base)) as stage:
        stage.path(shards[0])
        for path in stage.folder.iterdir():
            path.unlink()
        stage.folder.rmdir()
        stage.plan(shards)
        for shard in shards:
            assert stage.path(shard) == source / shard.path
    (warning,) = warnings_of(caplog)
    assert "No such file or directory. From now on" in warning
    with closing(Stage(source, base)) as again:
        assert again.path(shards[0]).parent == again.folder


# The owner of the folder


def test_only_a_folder_of_this_user_alone(source, base):
    with closing(Stage(source, base)) as stage:
        ours = stage.folder
        assert ours.stat().st_mode & 0o777 == 0o700
    (base / "other").mkdir(mode=0o700)
    ours.symlink_to(base / "other")
    with pytest.raises(StorageError, match="is not a folder of this user alone"):
        Stage(source, base)
    ours.unlink()
    ours.mkdir(mode=0o755)
    with pytest.raises(StorageError, match=r"mode 755; expected \d+, 700"):
        Stage(source, base)
    base.chmod(0o777)
    with pytest.raises(StorageError, match="writable for everybody and not sticky"):
        Stage(source, base)
    ours.rmdir()
    base.chmod(0o1777)
    Stage(source, base).close()


def test_copies_from_before_a_reboot_are_not_used(source, shards, base, monkeypatch):
    before = Stage(source, base)
    path = before.path(shards[0])
    path.write_bytes(bytes(shards[0].bytes))  # a crash of the machine leaves such a file
    (base / "boot").write_text("another\n")
    monkeypatch.setattr(node_folder, "_BOOT_ID", base / "boot")
    with closing(Stage(source, base)) as stage:
        assert right(stage.path(shards[0]), shards[0])
    before.close()
