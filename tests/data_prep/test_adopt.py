"""`data_prep index` makes a data set of HDF5 files that other programs wrote."""

import itertools
import os
import sys

import h5py
import numpy as np
import pytest

from hpctrain.data.loading.loader import Loader
from hpctrain.data.samplers.order import Order
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.shard import digest_file
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import DataError
from tests import forkserver
from tests.written import write_shards

ENDS = [0, 30, 50, 90]
COUNT = ENDS[-1]
IMAGES = np.random.default_rng(0).integers(0, 255, (COUNT, 5, 4), dtype=np.uint8)
LABELS = np.arange(COUNT, dtype=np.int64) * 3
TEXTS = [np.arange(i % 5, dtype=np.uint16) + i for i in range(COUNT)]
FIELDS = ("--field", "image=/x/data", "--field", "label=y")


def write(folder, axis=0, order="<", **options):
    """Write three HDF5 files as another program could, and return their folder."""
    folder.mkdir(exist_ok=True)
    for i, (start, stop) in enumerate(itertools.pairwise(ENDS)):
        with h5py.File(folder / f"run {i}.h5", "w") as file:
            images = np.moveaxis(IMAGES[start:stop], 0, axis)
            file.create_dataset("x/data", data=images, **options)
            file["y"] = LABELS[start:stop].astype(f"{order}i8")
    return folder


# Each value is (sample axis, byte order, options of h5py).
LAYOUTS = {
    "contiguous": (0, "<", {}),
    "big-endian": (0, ">", {}),
    "axis": (2, "<", {}),
    "one sample": (0, "<", {"chunks": (1, 5, 4), "compression": "gzip"}),
    "tiles": (0, "<", {"chunks": (8, 2, 4)}),
    "lzf": (1, "<", {"chunks": (5, 8, 4), "compression": "lzf"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adopted_folder_reads_as_h5py_does(tmp_path, data_prep, layout, caplog):
    axis, order, options = LAYOUTS[layout]
    folder = write(tmp_path / "set", axis, order, **options)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    more = ["--axis", f"image={axis}"] if axis else []
    code, out, err = data_prep("index", folder, *FIELDS, *more, "--workers", 1)
    assert (code, err) == (0, "")
    assert ("decoded by HDF5, slowly" in caplog.text) <= (layout == "lzf")  # once in a process
    assert "90 samples (train 90) in 3 shards" in out
    index = Index.load(folder)
    assert index.fields["image"].dataset == "/x/data"
    assert [shard.path for shard in index.shards] == ["run 0.h5", "run 1.h5", "run 2.h5"]
    for shard in index.shards:
        assert shard.digest == digest_file(folder / shard.path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before | {
        "index.json": (folder / "index.json").read_bytes()
    }
    statistics = index.statistics["train"]
    assert statistics["image"].mean == pytest.approx(IMAGES.mean(), rel=1e-12)
    assert statistics["image"].std == pytest.approx(IMAGES.std(), rel=1e-12)
    assert statistics["label"].max == LABELS.max()

    files = [h5py.File(folder / shard.path) for shard in index.shards]
    raw = np.concatenate([np.moveaxis(file["x/data"][:], axis, 0) for file in files])
    assert (raw == IMAGES).all()
    for mapped in (True, False):
        reader = Reader(folder, "train", mapped=mapped)
        rows = reader.read(np.arange(COUNT))
        assert (rows["image"] == raw).all()
        assert (rows["label"] == LABELS).all()
        shuffled = Order(COUNT, seed=1)(0, np.arange(COUNT))
        assert (reader.read(shuffled)["image"] == raw[shuffled]).all()
    batches = list(Loader(Reader(folder, "train"), global_batch_size=30, seed=1, max_epochs=1))
    assert len(batches) == 3
    for samples, batch in zip(shuffled.reshape(3, 30), batches, strict=True):
        assert (np.asarray(batch["image"]) == raw[samples]).all()
        assert (np.asarray(batch["label"]) == LABELS[samples]).all()
    for file in files:
        file.close()


def test_variable_length_fields(tmp_path, data_prep):
    for i, (start, stop) in enumerate(itertools.pairwise(ENDS)):
        with h5py.File(tmp_path / f"{i}.hdf5", "w") as file:
            file["tokens"] = np.concatenate(TEXTS[start:stop])
            file["ends"] = np.cumsum([0, *map(len, TEXTS[start:stop])]).astype("u4")
    assert data_prep("index", tmp_path, "--field", "text=tokens:ends")[0] == 0
    index = Index.load(tmp_path)
    assert [shard.elements["text"] for shard in index.shards] == [
        sum(map(len, TEXTS[start:stop])) for start, stop in itertools.pairwise(ENDS)
    ]
    lengths = [len(text) for text in TEXTS]
    statistics = index.statistics["train"]["text"]
    assert (statistics.lengths.min, statistics.lengths.max) == (0, 4)
    assert statistics.lengths.mean == pytest.approx(np.mean(lengths))
    assert statistics.mean == pytest.approx(np.concatenate(TEXTS).mean())
    rows = Reader(tmp_path, "train").read(np.array([89, 0, 33, 33]))["text"]
    assert [row.tolist() for row in rows] == [TEXTS[i].tolist() for i in (89, 0, 33, 33)]


def test_what_lies_as_ours_does_has_the_same_digest(tmp_path, data_prep):
    samples = {"x": LABELS, "text": TEXTS}
    was = write_shards(tmp_path, [("train", samples)], max_bytes=500)
    (tmp_path / "index.json").unlink()
    files = [tmp_path / shard.path for shard in was.shards]
    assert (
        data_prep("index", *files, "--field", "x=/x", "--field", "text=text/values:text/offsets")[0]
        == 0
    )
    index = Index.load(tmp_path)
    assert index.digest == was.digest  # a lost index can be written again
    assert index.shards == was.shards
    assert index.statistics["train"]["x"].mean == pytest.approx(was.statistics["train"]["x"].mean)


def test_splits_go_by_the_names_of_the_files(tmp_path, data_prep):
    folder = write(tmp_path / "set")
    split = "val=run 2*,train=*"
    assert data_prep("index", folder, *FIELDS, "--split", split)[0] == 0
    index = Index.load(folder)
    assert {name: index.split(name).count for name in index.splits} == {"train": 50, "val": 40}
    assert (Reader(folder, "val").read(np.arange(40))["label"] == LABELS[50:]).all()
    assert index.statistics["val"]["label"].min == LABELS[50]
    for wrong, words in {
        "train=*,val=nothing*": "no file is left for val",
        "val=run 2*": "no pattern matches run 0.h5",
        "a b": "split 'a b': a name has letters",
    }.items():
        code, _, err = data_prep("index", folder, *FIELDS, "--split", wrong, "--overwrite")
        assert code in (2, 3)
        assert words in err
    assert Index.load(folder) == index


def test_the_same_command_twice(tmp_path, data_prep):
    folder = write(tmp_path / "set")
    command = ("index", folder, *FIELDS)
    assert data_prep(*command)[0] == 0
    first = (folder / "index.json").read_bytes()
    code, out, _ = data_prep(*command)
    assert code == 0
    assert "already holds this index" in out
    data_prep.refuses(
        3, ("has another index", "--overwrite replaces it"), *command, "--split", "test"
    )
    assert (folder / "index.json").read_bytes() == first
    assert data_prep(*command, "--split", "test", "--overwrite")[0] == 0
    assert Index.load(folder).splits == ("test",)
    (folder / "index.json").write_text("{")
    assert data_prep(*command)[0] == 3
    assert data_prep(*command, "--overwrite")[0] == 0
    (folder / ".hpctrain-partial").mkdir()
    assert "unfinished conversion" in data_prep(*command)[2]


ODD = {
    "text": (["abc"] * 5, "holds what no field has: dtype "),
    "bytes": (np.array([b"abc"] * 5), "holds what no field has: dtype "),
    "complex": (np.zeros(5, complex), "dtype complex128 is not supported; allowed"),
    "unsigned": (np.zeros(5, np.uint64), "dtype uint64 is not supported; allowed"),
    "record": (np.zeros(5, [("a", "i4"), ("b", "f4")]), "is not supported; allowed"),
    "scalar": (3, "is a single value"),
    "null": (h5py.Empty("f4"), "is empty (a null dataspace)"),
    "short": (np.zeros(4), "every field has the same number of samples; good has 5, field has 4"),
    "none": (np.zeros((5, 0)), "shape [0] has no elements"),
    "soft": (h5py.SoftLink("/nowhere"), "soft is not there; in this file are"),
    "external": (h5py.ExternalLink("other.h5", "/x"), "is a link into other.h5"),
    "broken": (h5py.ExternalLink("gone.h5", "/x"), "a link into gone.h5; the samples"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_a_field(tmp_path, data_prep, kind):
    content, words = ODD[kind]
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.arange(5)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["good"] = np.arange(5)
        file[kind] = content
    data_prep.refuses(
        3, (str(path), words), "index", path, "--field", "good=good", "--field", f"field={kind}"
    )
    assert not (tmp_path / "index.json").exists()


def test_samples_that_lie_in_other_files(tmp_path, data_prep):
    write(tmp_path)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((30,), "i8")
        layout[:] = h5py.VirtualSource("run 0.h5", "y", (30,))
        file.create_virtual_dataset("y", layout)
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("y", (30,), "i8", external=[(tmp_path / "raw.bin", 0, 240)])[:] = 1
    with h5py.File(tmp_path / "never.h5", "w") as file:
        file.create_dataset("y", (30,), "i8")
    for name, words in {
        "virtual": "y is a virtual dataset, of run 0.h5",
        "external": f"y is stored in the file {tmp_path}/raw.bin",
        "never": "y has 30 of 30 rows with values that were never written; --unwritten y",
    }.items():
        data_prep.refuses(3, words, "index", tmp_path / f"{name}.h5", "--field", "y=y")


def test_files_that_cannot_be_read(tmp_path, data_prep):
    folder = write(tmp_path / "set")
    good = (folder / "run 0.h5").read_bytes()
    path = folder / "other.h5"
    for content, words in {
        good[:3000]: "truncated file",
        b"": "file signature not found",
        b"hello" * 1000: "file signature not found",
        good[:8] + bytes(9000): "bad byte number",
    }.items():
        path.write_bytes(content)
        said = (f"{path} is not readable as HDF5: ", words)
        data_prep.refuses(3, said, "index", folder, *FIELDS)
    path.unlink()
    os.mkfifo(path)
    assert f"{path} is not a file" in data_prep("index", folder, *FIELDS)[2]
    assert f"{folder}/no.h5 does not exist" in data_prep("index", folder / "no.h5", *FIELDS)[2]
    (folder / "empty").mkdir()
    assert "has no .h5 or .hdf5 files" in data_prep("index", folder / "empty", *FIELDS)[2]


def test_a_file_that_is_written_to(tmp_path, data_prep):
    folder = write(tmp_path / "set")
    with h5py.File(folder / "run 1.h5", "r+"):
        child = forkserver.run(
            [sys.executable, "-m", "data_prep", "index", folder, *FIELDS],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert child.returncode == 3
    assert "run 1.h5 is not readable as HDF5: " in child.stderr
    assert "close it where it is written" in child.stderr


def test_files_of_another_schema(tmp_path, data_prep):
    folder = write(tmp_path / "set")
    with h5py.File(folder / "z.h5", "w") as file:
        file["x/data"] = IMAGES.astype(np.int16)
        file["y"] = LABELS
    code, _, err = data_prep("index", folder, *FIELDS)
    assert code == 3
    assert f"{folder}/z.h5: field 'image' is int16[5, 4], in run 0.h5 uint8[5, 4]" in err


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([0, 4, 2, 10], "the offsets of 't' go back"),
        ([0, 4, 9], "field 't' has 10 values, its offsets go from 0 to 9"),
        ([1, 4, 10], "field 't' has 10 values, its offsets go from 1 to 10"),
        ([0.0, 10.0], "offsets are whole numbers"),
        ([0], "has no samples"),
    ],
)
def test_wrong_offsets(tmp_path, data_prep, ends, words):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"], file["o"] = np.arange(10), np.array(ends)
    data_prep.refuses(3, words, "index", tmp_path, "--field", "t=v:o")


def test_links(tmp_path, data_prep):
    folder = write(tmp_path / "set")
    (folder / "link.h5").symlink_to("run 0.h5")
    (tmp_path / "elsewhere").mkdir()
    outside = tmp_path / "elsewhere" / "link.h5"
    outside.symlink_to(folder / "run 1.h5")
    assert "are the same file" in data_prep("index", folder, *FIELDS)[2]
    code, _, err = data_prep("index", outside, *FIELDS)
    assert code == 3
    assert f"{outside} is a link to {folder}/run 1.h5: an index lists the file itself" in err
    _, _, err = data_prep("index", outside, *FIELDS, "--out", tmp_path / "elsewhere")
    assert f"which is {folder}/run 1.h5, lies outside of {tmp_path}/elsewhere" in err
    assert data_prep("index", outside, folder / "link.h5", *FIELDS, "--out", tmp_path)[0] == 0
    paths = [shard.path for shard in Index.load(tmp_path).shards]
    assert paths == ["set/run 1.h5", "set/run 0.h5"]
    assert (Reader(tmp_path, "train").read(np.arange(20))["label"] == LABELS[30:50]).all()
    (folder / "dangling.h5").symlink_to("gone.h5")
    words = "dangling.h5 does not exist, or is a link that leads nowhere"
    assert words in data_prep("index", folder / "dangling.h5", *FIELDS)[2]


def test_the_index_lies_above_the_files(tmp_path, data_prep):
    write(tmp_path / "a")
    write(tmp_path / "b")
    code, out, _ = data_prep("index", tmp_path / "a", tmp_path / "b", *FIELDS)
    assert code == 0
    assert f"{tmp_path}: 180 samples" in out
    assert Index.load(tmp_path).shards[3].path == "b/run 0.h5"
    code, _, err = data_prep("index", tmp_path / "a", *FIELDS, "--out", tmp_path / "b")
    assert code == 3
    assert "lies outside of" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--field", "x"], "--field 'x' is not NAME=DATASET or NAME=VALUES:OFFSETS"),
        (["--field", "x=y:"], "--field x=y:: it is NAME=DATASET"),
        (["--field", "x=y", "--field", "x=z"], "'x' is there twice"),
        (["--field", "mask=y"], "a field cannot be named 'mask'"),
        (["--field", "x=y", "--axis", "z=1"], "--axis 'z=1': it is NAME=K"),
        (["--field", "x=y", "--axis", "x=one"], "--axis 'x=one': it is NAME=K"),
        (["--field", "x=y:z", "--axis", "x=0"], "lie end to end along axis 0"),
        (["--field", "x=y", "--axis", "x=1"], "y has 1 axes, [30]; there is no axis 1"),
        (["--field", "x=nope"], "nope is not there; in this file are /x/data uint8 (30, 5"),
        (["--field", "x=x"], "x is a group"),
        (["--field", "x=y", "--workers", "0"], "'0' is not a whole number from 1"),
    ],
)
def test_wrong_options(tmp_path, data_prep, options, words):
    folder = write(tmp_path / "set")
    code, _, err = data_prep("index", folder, *options)
    assert code in (2, 3)
    assert words in err
    assert not (folder / "index.json").exists()


@pytest.mark.parametrize("own_names", [True, False])
def test_adopted_files_are_never_replaced(tmp_path, data_prep, own_names):
    folder = write(tmp_path / "set")
    np.save(tmp_path / "x.npy", LABELS)
    if own_names:  # hpctrain gives its own shards such names
        (folder / "run 0.h5").rename(folder / "train-00000.h5")
    assert data_prep("index", folder, *FIELDS)[0] == 0
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for more in ([], ["--overwrite"]):
        code, out, err = data_prep("arrays", tmp_path / "x.npy", folder, *more)
        assert (code, out) == (3, "")
        assert "is made of files that others wrote" in err
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(DataError, match="files that others wrote"):
        write_shards(folder, [("train", {"x": np.zeros(3, np.float32)})])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
