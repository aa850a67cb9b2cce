"""`data_prep sample` writes scikit-learn's digits and the source of the standard library."""

import sysconfig

import numpy as np
import pytest

from data_prep.options import Options
from data_prep.source import BadRecords
from data_prep.sources.sample import stdlib
from data_prep.writing.convert import convert
from data_prep.writing.split import parse_split
from hpctrain.tasks.dataset_tokenizer import DatasetTokenizer
from tests.data_prep import read_back


def test_digits_are_those_of_scikit_learn(tmp_path, data_prep):
    code, out, err = data_prep("sample", "digits", tmp_path / "digits")
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path}/digits: 1797 samples (train 1415, val 382) in 2 shards, ")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    train, val = (read_back.rows(tmp_path / "digits", split) for split in ("train", "val"))
    assert train["image"].shape == (1415, 1, 8, 8)
    assert (train["image"].dtype, train["label"].dtype) == (np.uint8, np.int64)
    both = [
        np.concatenate([split["image"].reshape(-1, 64), split["label"][:, None]], axis=1)
        for split in (train, val)
    ]
    found = sorted(map(tuple, np.concatenate(both)))
    assert found == sorted(map(tuple, np.column_stack([images, labels]).astype(int)))
    # No image is in both splits.
    assert not {i.tobytes() for i in train["image"]} & {i.tobytes() for i in val["image"]}
    assert set(val["label"]) == set(range(10))


@pytest.mark.usefixtures("any_workers")
def test_digits_stay_the_same(tmp_path, data_prep):
    """The split and the order of the samples never change: papers and tests refer to them."""
    data_prep("sample", "digits", tmp_path / "a")
    data_prep("sample", "digits", tmp_path / "b", "--workers", "2")
    for name in ("train-00000.h5", "val-00000.h5"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert read_back.rows(tmp_path / "a", "train")["label"][:8].tolist() == [2, 4, 6, 7, 0, 1, 2, 3]


def test_files_that_are_no_text_are_left_out(tmp_path):
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "a.py").write_text("x = 'ä'\n")
    (tmp_path / "pkg" / "b.py").write_text("y = 2\n")
    (tmp_path / "pkg" / "empty.py").write_text("")
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n")
    (tmp_path / "pkg" / "tests" / "c.py").write_text("skipped")
    source = stdlib(Options(2**20), tmp_path)
    blocks = [
        block for piece in source.pieces for block in source.read(piece.what, BadRecords("stop"))
    ]
    found = [path.tobytes().decode() for block in blocks for path in block.values["path"]]
    assert found == ["a.py", "pkg/b.py"]


def test_no_source(tmp_path):
    with pytest.raises(Exception, match=r"there are no \.py files"):
        stdlib(Options(2**20), tmp_path)


def test_tokens_of_the_standard_library(tmp_path):
    """A tokenizer that is trained on the train split alone encodes both splits without loss."""
    library = tmp_path / "lib"
    library.mkdir()
    for i in range(40):
        (library / f"{i:02}.py").write_text(f"def name_{i}(x):\n    return x + {i}  # ä\n" * 9)
    options = Options(2**20, split=parse_split("train=0.8,val=0.2"))
    source = stdlib(options, library, 280)
    convert(source, tmp_path / "out", Options(2**20, split=options.split, quiet=True))
    tokenizer = DatasetTokenizer.of(tmp_path / "out", "tokens")
    assert (tokenizer.vocabulary, tokenizer.eod) == (280, 0)
    lengths = tokenizer.byte_lengths()
    for split in ("train", "val"):
        rows = read_back.rows(tmp_path / "out", split)
        for text, ids in zip(rows["text"], rows["tokens"], strict=True):
            assert ids.dtype == np.uint16
            assert ids[-1] == tokenizer.eod
            assert tokenizer.decode(ids.tolist()).encode() == text.tobytes()
            assert lengths[ids].sum() == len(text)
    # The held-out files do not change the tokenizer.
    held_out = [path.tobytes().decode() for path in read_back.rows(tmp_path / "out", "val")["path"]]
    for name in held_out:
        (library / name).write_text("zzzz" * 1000)
    again = stdlib(options, library, 280)
    assert again.identity["tokenizer"] == source.identity["tokenizer"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits", "--train-bpe", "300"], "--train-bpe is of `sample stdlib`, not of"),
        (["stdlib", "--train-bpe", "256"], "--train-bpe 256: a vocabulary has 257 tokens"),
        (["stdlib", "--train-bpe", "300", "--split", "file:train=*"], "needs NAME=FRACTION"),
    ],
)
def test_tokens_that_cannot_be_made(tmp_path, data_prep, monkeypatch, arguments, said):
    name, *options = arguments
    (tmp_path / "mine.py").write_text("import this")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    data_prep.refuses(2, said, "sample", name, tmp_path / "OUT", *options, "--quiet")
