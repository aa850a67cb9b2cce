"""Damaged files of every format give the right data, or one message that names the file.

Each example flips bits of a small file, or cuts it off. The right data are what another library
reads from the damaged file; if the format has checksums, they are the original data. A refusal
leaves nothing behind. Everything runs in this process, and the examples are the same each time.
"""

import contextlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.cli import main
from tests.data_prep.fuzz_cases import CASES, files

ROOM = 2**26  # bytes that the disk seems to have: a damaged size must not fill the real one
LIBRARIES = ("pyarrow", "PIL")


def run(*args):
    """Run a command in this process; return the exit code and what it has written to stderr."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(args)
        except SystemExit as stopped:
            code = stopped.code
    return code, err.getvalue()


def written():
    """Return the samples that OUT has, by field."""
    found = {}
    for path in sorted(Path("OUT").glob("*.h5")):
        with h5py.File(path) as file:
            for name, item in file.items():
                if isinstance(item, h5py.Dataset):
                    values = list(item[:])
                else:
                    values = np.split(item["values"][:], item["offsets"][1:-1])
                found.setdefault(name, []).extend(values)
    return found


def same(found, expected):
    """Return whether samples are equal; `expected` may hold bytes or, for CSV, text."""
    if len(found) != len(expected):
        return False
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, str):
            one = np.asarray(one)
            other = other.encode() if one.ndim else np.array(float(other or "nan"), one.dtype)
        if isinstance(other, bytes):
            other = np.frombuffer(other, np.uint8)
        if not np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f"):
            return False
    return True


def agree(found, expected):
    # A flipped bit in the name of a field is no damage that could be seen.
    return len(found) == len(expected) and all(
        same(found[name], expected.get(name, other))
        for name, other in zip(found, expected.values(), strict=True)
    )


def check(name, damaged):
    case, out = CASES[name], Path("OUT")
    for path, content in files(name).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(damaged if path == case.target else content)
    before = set(Path().rglob("*"))
    index = case.args[0] == "index"
    code, err = run(*case.args, *([] if index else ["OUT"]), "--workers", "1", "--quiet")
    if code:
        assert code in ((2, 3, 6) if "are to be written" in err else (2, 3))
        assert err.startswith("data_prep: ")
        assert err.count("\n") == 1, err
        # The file or its folder is named, or the column whose name is none, with the option.
        named = case.target.split("/")[0] in err or "--rename" in err
        assert code == 6 or named, err
        assert set(Path().rglob("*")) == before
        return
    if index:
        assert run("inspect", ".", "--verify") == (0, "")
        return
    assert not (out / ".hpctrain-partial").exists()
    found = written()
    if case.read is not None:
        with contextlib.suppress(Exception):
            if agree(found, case.read()):
                return
    assert agree(found, original(name)), "other data than the source has"


ORIGINAL = {}


def original(name):
    """Return the samples of the file that is not damaged."""
    if name not in ORIGINAL:
        case = CASES[name]
        with inside_a_folder():
            for path, content in files(name).items():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_bytes(content)
            assert run(*case.args, "OUT", "--workers", "1", "--quiet") == (0, "")
            ORIGINAL[name] = written()
            if case.read is not None:
                assert agree(ORIGINAL[name], case.read())
    return ORIGINAL[name]


@contextlib.contextmanager
def inside_a_folder():
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def damages(size):
    """Return a strategy of the damages to a file: flipped bits, or the size of what is left."""
    flip = st.tuples(st.integers(0, size - 1), st.integers(0, 7))
    return st.one_of(st.lists(flip, min_size=1, max_size=2), st.integers(0, size - 1))


def damaged(content, damage):
    if isinstance(damage, int):
        return content[:damage]
    changed = bytearray(content)
    for at, bit in damage:
        changed[at] ^= 1 << bit
    return bytes(changed)


@pytest.fixture(autouse=True)
def room(monkeypatch):
    for library in LIBRARIES:
        pytest.importorskip(library)
    usage = SimpleNamespace(total=ROOM, used=0, free=ROOM)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


# The digests of the samples as they were before: conversions to come give the same.
DIGESTS = {
    **dict.fromkeys(("npy", "hdf5 chunks"), "c940fb7e875a661530b4cde5b1082784"),
    "npz deflate": "fe60e4f0d7ee2b1de40cb7afb8c35b87",
    "csv": "4e70bb9e0f721a26a03b937a034d540d",
    "parquet": "15386423d76a733b05ea88febd03209b",
    "webdataset": "6d14a21646b225ca1264e2914185bfe7",
    "png": "a39b54b577f460bfb1434e12971cdbba",
    "txt gz": "77db087a2f5586107607f4be7d5981db",
    "jsonl": "0fff5ecce0ff3a7b5a7a66b356259807",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_each_format_keeps_its_digest(name):
    with inside_a_folder():
        CASES[name].make()
        assert run(*CASES[name].args, "OUT", "--workers", "1", "--quiet") == (0, "")
        digest = xxhash.xxh3_128()
        for field, values in sorted(written().items()):
            for value in values:
                digest.update(f"{field} {value.dtype} {value.shape}".encode() + value.tobytes())
        assert digest.hexdigest() == DIGESTS[name]


def fuzz(examples):
    def test(name, data):
        content = files(name)[CASES[name].target]
        damage = data.draw(damages(len(content)), "damage")
        with inside_a_folder():
            check(name, damaged(content, damage))

    quiet = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return quiet(given(data=st.data())(test))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file(name):
    fuzz(5)(name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_many_damaged_files(name):
    fuzz(1000)(name)
