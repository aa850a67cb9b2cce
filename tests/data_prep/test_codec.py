"""`--codec` compresses shards."""

import subprocess
import sys

import h5py
import hdf5plugin  # noqa: F401  the import registers the filters
import numpy as np
import pytest

from data_prep.writing.compression import CODECS, Compression
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.shard import digest_file
from hpctrain.data.sources.reader import Reader
from tests.written import write_shards

COMPRESSED = [codec for codec in CODECS if codec != "none"]
FILTERS = {"gzip": 1, "lz4": 32004, "zstd": 32015}
SHUFFLE = 2
rng = np.random.default_rng(0)


def smooth(count=300):
    return np.cumsum(rng.integers(-2, 3, (count, 16, 64)), -1).astype(np.float32)


@pytest.fixture
def files(tmp_path):
    data = {
        "x": smooth(),
        "image": rng.integers(0, 9, (300, 3, 16, 16), dtype=np.uint8),
        "label": np.arange(300) % 7,
    }
    for name, values in data.items():
        np.save(tmp_path / f"{name}.npy", values)
    return [tmp_path / f"{name}.npy" for name in data], data


def filters(dataset):
    properties = dataset.id.get_create_plist()
    return [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]


@pytest.mark.parametrize("codec", COMPRESSED)
def test_every_codec(tmp_path, files, data_prep, codec):
    paths, data = files
    out, plain = tmp_path / "OUT", tmp_path / "plain"
    asked = ["--codec", codec, "--shard-size", "500KB"]
    assert data_prep("arrays", *paths, out, *asked, "--workers", 1)[0] == 0
    assert data_prep("arrays", *paths, plain, "--shard-size", "500KB")[0] == 0
    index = Index.load(out)
    assert len(index.shards) > 2
    small = {path.name: path.stat().st_size for path in out.glob("*.h5")}
    assert sum(small.values()) < 0.7 * sum(s.bytes for s in Index.load(plain).shards)
    for shard in index.shards:
        assert small[shard.path] == shard.bytes
        assert digest_file(out / shard.path) == shard.digest
    with h5py.File(out / index.shards[0].path) as file:
        assert filters(file["x"]) == [SHUFFLE, FILTERS[codec]]
        assert filters(file["image"]) == [FILTERS[codec]]
        for name in ("x", "image"):
            assert file[name].chunks == file[name].shape  # less than a MiB
        assert file["label"].chunks == (len(file["label"]),)
    order = rng.permutation(300)
    found = Reader(out, "train").read(order)
    for name, values in data.items():
        np.testing.assert_array_equal(found[name], values[order])
    assert index.provenance["options"]["codec"] == codec
    assert index.provenance["compression"] == {
        "codec": codec,
        "level": CODECS[codec],
        "chunk_bytes": 2**20,
    }
    assert index.statistics == Index.load(plain).statistics


def test_the_codec_is_a_part_of_what_was_asked(tmp_path, files, data_prep):
    paths, _ = files
    out = tmp_path / "OUT"
    assert data_prep("arrays", *paths, out, "--codec", "zstd")[0] == 0
    assert "already holds" in data_prep("arrays", *paths, out, "--codec", "zstd")[1]
    code, _, err = data_prep("arrays", *paths, out, "--codec", "gzip")
    assert (code, "holds another data set" in err) == (3, True)
    assert data_prep("arrays", *paths, out)[0] == 3
    assert data_prep("arrays", *paths, out, "--codec", "lz4", "--overwrite")[0] == 0
    with h5py.File(out / "train-00000.h5") as file:
        assert filters(file["x"]) == [SHUFFLE, FILTERS["lz4"]]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--codec", "snappy"], "invalid choice: 'snappy'"),
        (["--codec", "auto"], "invalid choice: 'auto'"),
    ],
)
def test_bad_options(tmp_path, files, data_prep, asked, words):
    data_prep.refuses(2, words, "arrays", *files[0], tmp_path / "OUT", *asked)
    assert not (tmp_path / "OUT").exists()


def test_chunks_are_whole_samples_and_at_least_one(tmp_path):
    x = rng.integers(0, 3, (10, 1000)).astype(np.uint8)
    for size, rows in ((1, 1), (999, 1), (2500, 2), (10**9, 10)):
        compression = Compression("gzip", chunk_bytes=size)
        write_shards(tmp_path, [("train", {"x": x})], compression=compression)
        with h5py.File(tmp_path / "train-00000.h5") as file:
            assert file["x"].chunks == (rows, 1000)
            np.testing.assert_array_equal(file["x"], x)


WITHOUT = """
import sys
sys.modules["hdf5plugin"] = None
from data_prep.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_hdf5plugin(tmp_path, files):
    command = [sys.executable, "-c", WITHOUT, "arrays", *files[0], tmp_path / "OUT"]
    done = subprocess.run(
        [*command, "--codec", "zstd", "--workers", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "codec zstd needs hdf5plugin" in done.stderr
    assert not (tmp_path / "OUT").exists()
