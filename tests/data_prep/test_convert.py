"""A conversion never loses a data set, names each problem, and reports its progress."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.source import Piece, SampleBlock, SourceFile
from data_prep.writing.convert import convert
from data_prep.writing.finalize import summary
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.shard import digest_file
from hpctrain.errors import ConfigError, DataError
from tests.data_prep.hand import Row, hand, options


@pytest.fixture
def numbers(tmp_path):
    np.save(tmp_path / "y.npy", np.arange(100))
    return tmp_path / "y.npy"


def digests(folder):
    index = Index.load(folder)
    for shard in index.shards:
        assert digest_file(folder / shard.path) == shard.digest
    assert sorted(os.listdir(folder)) == sorted(["index.json", *(s.path for s in index.shards)])
    return index.digest


def test_the_same_command_twice_does_the_work_once(tmp_path, numbers, data_prep):
    out = tmp_path / "OUT"
    assert data_prep("arrays", numbers, out)[0] == 0
    before = (out / "index.json").read_bytes(), (out / "train-00000.h5").stat().st_mtime_ns
    code, said, err = data_prep("arrays", numbers, out)
    assert (code, err) == (0, "")
    assert said == f"{out} already holds this data set: {Index.load(out).digest}\n"
    os.rename(numbers, tmp_path / "z.npy")  # the content is the same
    assert "already holds" in data_prep("arrays", "--field", f"y={tmp_path}/z.npy", out)[1]
    assert "already holds" in data_prep("arrays", "--field", f"y={tmp_path}/z.npy", out)[1]
    assert before == (
        (out / "index.json").read_bytes(),
        (out / "train-00000.h5").stat().st_mtime_ns,
    )


@pytest.mark.parametrize(
    "other", [["--shard-size", "100KB"], ["--split", "train=0.5,val=0.5"], ["--field", "z=FILE"]]
)
def test_another_data_set_is_replaced_only_when_asked(tmp_path, numbers, data_prep, other):
    out = tmp_path / "OUT"
    data_prep("arrays", numbers, out)
    before = digests(out)
    other = [arg.replace("FILE", str(numbers)) for arg in other]
    code, said, err = data_prep("arrays", numbers, out, *other)
    assert (code, said) == (3, "")
    assert err == f"data_prep: {out} holds another data set, {before}; --overwrite replaces it\n"
    assert digests(out) == before
    assert data_prep("arrays", numbers, out, *other, "--overwrite")[0] == 0
    digests(out)


def test_a_damaged_data_set_is_not_taken_for_finished(tmp_path, numbers, data_prep):
    out = tmp_path / "OUT"
    data_prep("arrays", numbers, out)
    whole = digests(out)
    (out / "train-00000.h5").write_bytes(b"")
    data_prep.refuses(3, ("is truncated: it has 0 bytes", "--overwrite"), "arrays", numbers, out)
    assert data_prep("arrays", numbers, out, "--overwrite")[0] == 0
    assert digests(out) == whole


def test_a_folder_of_something_else_is_left_alone(tmp_path, numbers, data_prep):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    for option in ([], ["--overwrite"]):
        code, _, err = data_prep("arrays", numbers, tmp_path / "thesis", *option)
        assert code == 3
        assert "is not empty and holds no data set (there is 'chapter.tex')" in err
    (tmp_path / "thesis" / "index.json").write_text('{"format": "mds", "version": 2}')
    data_prep.refuses(3, "format is 'mds'", "arrays", numbers, tmp_path / "thesis", "--overwrite")
    assert sorted(os.listdir(tmp_path / "thesis")) == ["chapter.tex", "index.json"]


def test_out_and_the_source_are_apart(tmp_path, numbers, data_prep):
    code, _, err = data_prep("arrays", numbers, tmp_path)
    assert code == 2
    assert f"{tmp_path} is read, and is inside of OUT, {tmp_path}; give another OUT" in err
    (tmp_path / "link").symlink_to(tmp_path)
    assert data_prep("arrays", numbers, tmp_path / "link")[0] == 2
    with pytest.raises(ConfigError, match=r"is read, and OUT, .*/sub/OUT, is inside of it"):
        convert(hand([Row(1)], folders=[str(tmp_path)]), tmp_path / "sub" / "OUT", options())
    assert sorted(os.listdir(tmp_path)) == ["link", "y.npy"]


@pytest.mark.usefixtures("any_workers")
def test_a_source_that_is_changed_while_it_is_read(tmp_path, data_prep, numbers):
    file = SourceFile.of(numbers)
    source = hand([Row(0)], [Row(1)], act=f"change:{numbers}", files=(file,))
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"y\.npy was changed while it was being read"):
            convert(source, tmp_path / "OUT", options(workers=workers))
    gone = tmp_path / "gone"
    with pytest.raises(DataError, match="gone cannot be read: No such file"):
        convert(hand([], [], act=f"oserror:{gone}"), tmp_path / "NEW", options())


def test_a_source_without_samples(tmp_path):
    bad = hand([Row(1, bad="x")])
    for source, left in ((hand(), []), (hand([]), []), (bad, ["OUT", "OUT/problems.jsonl"])):
        with pytest.raises(DataError, match="the source has no samples"):
            convert(source, tmp_path / "OUT", options(on_error="skip"))
        assert sorted(tmp_path.rglob("*")) == [tmp_path / name for name in left]


@pytest.mark.usefixtures("any_workers")
def test_records_that_cannot_be_used(tmp_path):
    source = hand([Row(1), Row(2, bad="no\ngood")], [Row(float("nan"))], [Row(4), Row(5, bad="é")])
    wanted = [
        {"file": "f0", "record": "row 1", "reason": "no\ngood"},
        {"file": "f1", "record": "row 0", "reason": "field 'x' has 1 NaN or infinite values"},
        {"file": "f2", "record": "row 1", "reason": "é"},
    ]
    report = tmp_path / "OUT" / "problems.jsonl"
    with pytest.raises(DataError, match="f0: row 1: no\ngood; --on-error skip leaves"):
        convert(source, tmp_path / "OUT", options(nan="refuse"))
    assert not report.exists()
    for workers in (1, 2):
        skip = options(nan="refuse", on_error="skip", workers=workers, overwrite=True)
        index = convert(source, tmp_path / "OUT", skip)
        assert index.split("train").count == 2
        assert index.provenance["left_out"]["unusable"] == 3
        assert list(map(json.loads, report.read_text().splitlines())) == wanted
        shutil.rmtree(tmp_path / "OUT")
    # Without --nan refuse, the summary says that there are such values.
    index = convert(hand([Row(float("nan"))]), tmp_path / "NAN", options())
    assert "x has 1 NaN or infinite values; --nan refuse would say where" in summary(index)


def test_blocks_that_do_not_fit(tmp_path):
    class Wrong(type(hand())):
        def read(self, what, reading):
            values = {"x": np.zeros(2), "label": np.zeros(2, np.int64), "text": [NONE, NONE]}
            yield SampleBlock(values | what[1], file="f", **what[0])

    NONE = np.zeros(0, np.uint8)
    for given, values, said in (
        ({}, {"x": np.zeros(2, np.float32)}, "f: field 'x': found samples of float32"),
        ({}, {"x": np.zeros(3)}, "f: the fields of a batch have different numbers of samples"),
        ({"keys": [b"a"]}, {}, "f: a block of 2 samples has 1 keys"),
        ({"column": ["a"] * 3}, {}, "f: a block of 2 samples has 3 column"),
    ):
        source = Wrong(name="wrong", fields=hand().fields, pieces=[Piece((given, values))])
        with pytest.raises(DataError, match=said):
            convert(source, tmp_path / "OUT", options())
        assert not (tmp_path / "OUT").exists()


def test_provenance(tmp_path, numbers, data_prep):
    data_prep("arrays", numbers, tmp_path / "OUT", "--split", "train=0.5,val=0.5")
    found = Index.load(tmp_path / "OUT").provenance
    assert found["command"].startswith(f"python -m data_prep arrays {numbers} ")
    keys = {"command", "created", "versions", "options", "source", "fingerprint", "left_out"}
    keys |= {"compression"}
    assert set(found) == keys
    assert set(found["versions"]) == {"hpctrain", "python", "numpy", "h5py", "hdf5"}
    given = {"shard_bytes": 256 * 2**20, "split": "train=0.5,val=0.5", "on_error": "stop"}
    assert given.items() <= found["options"].items()
    assert (found["source"]["files"], found["source"]["bytes"]) == (1, numbers.stat().st_size)
    assert found["left_out"] == {"unusable": 0}


def test_help_is_quick_and_torch_is_never_loaded(tmp_path, numbers):
    code = (
        "import sys; from data_prep.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'h5py', 'rich', 'sklearn', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        f"assert main(['arrays', {str(numbers)!r}, {str(tmp_path / 'OUT')!r}]) == 0\n"
        f"assert main(['inspect', {str(tmp_path / 'OUT')!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_options_stand_anywhere(tmp_path, numbers, data_prep):
    for i, words in enumerate(
        (
            ["--quiet", numbers, tmp_path / "0"],
            [numbers, "--quiet", tmp_path / "1"],
            [numbers, tmp_path / "2", "--quiet"],
            ["--quiet", "--", numbers, tmp_path / "3"],
        )
    ):
        assert data_prep("arrays", *words) == (0, "", "")
        assert Index.load(tmp_path / str(i)).split("train").count == 100
    code, out, err = data_prep("arrays", numbers, "--codek", "zstd", tmp_path / "4")
    assert (code, out) == (2, "")
    assert "python -m data_prep arrays --help lists what there is" in err
    assert "unrecognized arguments: --codek" in err


@pytest.mark.parametrize("size", ["9" * 400 + "GiB", "1e3MB", "-1MB", "64", "0KB", "8 EB", "²MB"])
def test_sizes_that_are_none(tmp_path, numbers, data_prep, size):
    code, out, err = data_prep("arrays", numbers, tmp_path / "OUT", f"--shard-size={size}")
    assert (code, out) == (2, "")
    assert err.startswith(f"data_prep: --shard-size {size!r}: give the bytes with a unit")
    assert not (tmp_path / "OUT").exists()


def test_names_that_the_loader_needs(data_prep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("mask.npy", np.arange(4))
    Path("own.py").write_text(
        "def masks(): return [{'mask': i, 'n': i} for i in range(4)]\n"
        "def texts(): return [{'t': 'ab', 't_length': i} for i in range(4)]\n"
    )
    for command in (("arrays", "mask.npy"), ("python", "own.py:masks")):
        err = data_prep(*command, "OUT")[2]
        assert "a field cannot be named 'mask', because each batch of the loader has" in err
        assert "--field (arrays, webdataset), --rename (table)" in err
    assert data_prep("arrays", "OUT", "--field", "truth=mask.npy")[0] == 0
    words = "the loader adds 't_length' for the lengths of 't'; --field (arrays,"
    data_prep.refuses(3, words, "python", "own.py:texts", "O2")
