"""Shards are ordinary HDF5 files, which HDF5's tools and h5py can read without hpctrain.

Many processes can read a shard at the same time.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hdf5plugin
import numpy as np
import pytest

from data_prep.writing.compression import CODECS, Compression
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.sources.reader import Reader
from tests.written import write_shards

COUNT = 60
rng = np.random.default_rng(0)
SAMPLES = {
    "image": rng.integers(0, 5, (COUNT, 3, 8, 8), dtype=np.uint8),
    "x": np.arange(COUNT * 20, dtype=np.float32).reshape(COUNT, 4, 5),
    "label": np.arange(COUNT) - 7,
    "text": [np.full(i % 5, i, np.uint16) for i in range(COUNT)],
    "points": [np.full((i % 3, 2), i, np.float64) for i in range(COUNT)],
    "empty": [np.zeros(0, np.int32)] * COUNT,
}
TOOLS = {tool: shutil.which(tool) for tool in ("h5ls", "h5dump")}
needs_tools = pytest.mark.skipif(
    None in TOOLS.values(), reason="h5ls and h5dump are not there: apt-get install hdf5-tools"
)


@pytest.fixture(params=CODECS)
def codec(request):
    return request.param


few_codecs = pytest.mark.parametrize(
    "codec",
    [pytest.param(c, marks=() if c in ("gzip", "zstd") else pytest.mark.slow) for c in CODECS],
)


@pytest.fixture
def shard(tmp_path, codec):
    compression = Compression(codec, chunk_bytes=800)
    write_shards(tmp_path, [("train", SAMPLES)], compression=compression)
    return tmp_path / "train-00000.h5"


def run(*command, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_tools
def test_h5dump_reads_it(shard, codec):
    """HDF5's tools find the codecs of compressed shards in the plugin folder, as MATLAB does."""
    plugins = {"HDF5_PLUGIN_PATH": hdf5plugin.PLUGINS_PATH}
    for name, values in (
        ("label", SAMPLES["label"]),
        ("text/values", np.concatenate(SAMPLES["text"])),
        ("text/offsets", Ragged.of(SAMPLES["text"]).offsets),
        ("x", SAMPLES["x"]),
    ):
        dumped = run(TOOLS["h5dump"], "-y", "-w", "0", "-d", f"/{name}", shard, **plugins)
        data = dumped[dumped.index("DATA {") :]
        numbers = np.array(re.findall(r"-?\d+(?:\.\d+)?", data), float)
        np.testing.assert_array_equal(numbers, values.reshape(-1))
    assert '"hpctrain-shard"' in run(TOOLS["h5dump"], "-a", "/format", shard)


PLAIN = """
import sys
import h5py, numpy as np
if sys.argv[2] == "plugin":
    import hdf5plugin
assert not any("hpctrain" in name for name in sys.modules)
with h5py.File(sys.argv[1]) as file:
    offsets = file["text/offsets"][:]
    text = [file["text/values"][a:b] for a, b in zip(offsets, offsets[1:])]
    assert [t.tolist() for t in text] == [[i] * (i % 5) for i in range(60)]
    assert file["points/values"].shape == (60, 2)
    assert len(file["empty/values"]) == 0
    assert (file["x"][7:9] == np.arange(140, 180).reshape(2, 4, 5)).all()
    assert (file["label"][:] == np.arange(60) - 7).all()
    print(int(file["image"][:].sum()), file.attrs["count"])
"""


@few_codecs
def test_h5py_alone_reads_it(shard, codec):
    """A shard that is compressed by gzip needs no plugin."""
    plugin = "plugin" if codec in ("lz4", "zstd") else "none"
    said = run(sys.executable, "-c", PLAIN, shard, plugin)
    assert said == f"{SAMPLES['image'].sum(dtype=int)} {COUNT}\n"


# Tests of many readers at once, and of locks

READ = """
import sys
import h5py
with h5py.File(sys.argv[1], locking=False) as file:
    print(int(file["label"][:].sum()))
"""
HOLD = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@few_codecs
def test_reading_takes_no_locks_and_minds_none(shard, codec):
    """Another process holds both kinds of lock, as a program that writes would."""
    command = [sys.executable, "-c", HOLD, shard]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            reader = Reader(shard.parent, "train")
            np.testing.assert_array_equal(reader.read(np.arange(3))["x"], SAMPLES["x"][:3])
            total = f"{SAMPLES['label'].sum()}\n"
            if codec in ("none", "gzip"):
                read = READ.replace(", locking=False", "")
                said = run(sys.executable, "-c", read, shard, HDF5_USE_FILE_LOCKING="FALSE")
                assert said == total
            locks = Path("/proc/locks").read_text()
            holders = re.findall(rf" (\d+) \S+:{shard.stat().st_ino} ", locks)
            assert set(holders) <= {str(holder.pid)}
        finally:
            holder.communicate()
