"""`data_prep huggingface` converts data sets that `datasets` saved to disk."""

from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.shards.index import Index
from tests.data_prep.pictures import encoded
from tests.data_prep.read_back import fields, problems, rows

COUNT = 300
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def datasets():
    """Return the library, which takes seconds to import."""
    import datasets

    datasets.disable_progress_bars()
    return datasets


@pytest.fixture(scope="module")
def digits(datasets):
    """Return images, labels, and a data set of digits with a feature of each kind."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images[:COUNT].reshape(-1, 8, 8) * 16).astype(np.uint8)
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=NAMES),
            "text": datasets.Value("string"),
            "flag": datasets.Value("bool"),
            "when": datasets.Value("timestamp[s]"),
            "many": datasets.Sequence(datasets.Value("int32")),
            "pair": datasets.Sequence(datasets.Value("float32"), length=2),
        }
    )
    content = {
        "image": [{"bytes": encoded(image), "path": None} for image in images],
        "label": labels[:COUNT].tolist(),
        "text": [f"Ziffer {NAMES[label]} ä" for label in labels[:COUNT]],
        "flag": [bool(label % 2) for label in labels[:COUNT]],
        "when": list(range(COUNT)),
        "many": [list(range(i % 4)) for i in range(COUNT)],
        "pair": [[i, 0.5] for i in range(COUNT)],
    }
    return images, labels[:COUNT], datasets.Dataset.from_dict(content, features=features)


@pytest.mark.usefixtures("any_workers")
def test_each_feature(data_prep, digits):
    images, labels, saved = digits
    saved.save_to_disk("in", num_shards=3)
    code, said, err = data_prep("huggingface", "in", "OUT", "--workers", 2)
    assert (code, err) == (0, "")
    assert f"{COUNT} samples (train {COUNT}) in 3 shards" in said
    assert fields("OUT") == {
        "image": "uint8[1, 8, 8]",
        "label": "int64",
        "text": "uint8[*]",
        "flag": "uint8",
        "when": "int64",
        "many": "int32[*]",
        "pair": "float32[2]",
    }
    found = rows("OUT")
    assert (found["image"][:, 0] == images).all()
    assert (found["label"] == labels).all()
    assert (found["flag"] == labels % 2).all()
    assert (found["when"] == np.arange(COUNT)).all()
    for i in range(COUNT):
        assert found["text"][i].tobytes().decode() == f"Ziffer {NAMES[labels[i]]} ä"
        assert found["many"][i].tolist() == list(range(i % 4))
        assert found["pair"][i].tolist() == [i, 0.5]
    assert "already holds" in data_prep("huggingface", "in", "OUT")[1]


def test_a_dict_keeps_its_splits(data_prep, datasets, digits):
    _, labels, saved = digits
    parts = {"train": saved.select(range(200)), "test": saved.select(range(200, COUNT))}
    datasets.DatasetDict(parts).save_to_disk("in")
    assert (
        data_prep("huggingface", "in", "OUT", "--columns", "label,text", "--workers", "1")[0] == 0
    )
    assert (rows("OUT")["label"] == labels[:200]).all()
    assert (rows("OUT", "test")["label"] == labels[200:]).all()
    assert list(fields("OUT")) == ["label", "text"]
    assert (
        data_prep("huggingface", "in", "HASH", "--split", "a=0.5,b=0.5", "--workers", "1")[0] == 0
    )
    assert set(Index.load(Path("HASH")).splits) == {"a", "b"}
    assert (
        data_prep("huggingface", "in", "FLAG", "--split", "column:flag", "--workers", "1")[0] == 0
    )
    assert (rows("FLAG", "True")["label"] % 2).all()


def test_images_as_they_are_or_of_one_mode(data_prep, datasets):
    """The first image decides; what is refused of images is the same as in `images`."""
    small = np.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=np.uint8)
    content = [encoded(small), encoded(small[..., 0]), encoded(small[:8]), b"no image"]
    images = [{"bytes": item, "path": "x.png"} for item in content] + [None]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": images}, features=features).save_to_disk("in")
    command = ("huggingface", "in", "OUT", "--on-error", "skip", "--overwrite")
    assert data_prep(*command)[0] == 0
    assert (rows("OUT")["image"] == small.transpose(2, 0, 1)).all()
    words = ("it has 1 channel, the first image 3", "it has 8 x 24 pixels", "it is no JPEG", "null")
    for (record, reason), number, why in zip(problems("OUT"), range(2, 6), words, strict=True):
        assert record == f"row {number}"
        assert reason.startswith("column 'image': the image cannot be used: it ")
        assert why in reason
    assert data_prep(*command, "--size", "8x12", "--mode", "RGB")[0] == 0
    assert (fields("OUT"), len(rows("OUT")["image"])) == ({"image": "uint8[3, 8, 12]"}, 3)
    assert data_prep(*command, "--encoded")[0] == 0
    assert [image.tobytes() for image in rows("OUT")["image"]] == content[:3]


def test_arrow_whose_offsets_lead_out_of_it_is_refused(data_prep, datasets):
    """A reader that does not check the offsets would crash."""
    datasets.Dataset.from_dict({"t": ["hello", " world"]}).save_to_disk("in")
    path = Path("in/data-00000-of-00001.arrow")
    offsets = [np.array([0, 5, end], np.int32).tobytes() for end in (11, 2**30)]
    assert path.read_bytes().count(offsets[0]) == 1
    path.write_bytes(path.read_bytes().replace(*offsets))
    err = data_prep.refused("huggingface", "in", "OUT")
    assert "data-00000-of-00001.arrow cannot be read as Arrow" in err


@pytest.fixture
def bad(here, datasets, digits):
    _, _, saved = digits
    saved.select_columns(["label", "text"]).save_to_disk("good")
    saved.select_columns(["label"]).save_to_disk("cut")
    file = here / "cut" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:-700])
    saved.select_columns(["label"]).save_to_disk("gone")
    (here / "gone" / "data-00000-of-00001.arrow").unlink()
    saved.select_columns(["label"]).save_to_disk("json")
    (here / "json" / "dataset_info.json").write_text("{")
    nested = datasets.Features(
        {
            "audio": datasets.Audio(),
            "dict": {"a": datasets.Value("int64")},
            "grid": datasets.Array2D((2, 2), "int16"),
            "n": datasets.Value("int64"),
        }
    )
    datasets.Dataset.from_dict(
        {"audio": [None], "dict": [{"a": 1}], "grid": [[[1, 2], [3, 4]]], "n": [1]}, nested
    ).save_to_disk("odd")
    datasets.Dataset.from_dict({"n": [1, None], "s": ["a", "b"]}).save_to_disk("null")
    datasets.Dataset.from_dict({"n": [1, 2], "s": ["a", None]}).save_to_disk("nosplit")
    no_images = datasets.Dataset.from_dict(
        {"i": [None]}, features=datasets.Features({"i": datasets.Image()})
    )
    no_images.save_to_disk("noimage")
    (here / "file").write_text("x")
    (here / "void").mkdir()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nope"], 3, "nope is no folder of save_to_disk: Directory nope not found"),
        (["file"], 3, "file is no folder of save_to_disk"),
        (["void"], 3, "void is no folder of save_to_disk: Directory void is neither"),
        (["cut"], 3, "cut"),
        (["gone"], 3, "gone is no folder of save_to_disk"),
        (["json"], 3, "json is no folder of save_to_disk"),
        (["odd"], 3, "the column 'audio' is struct<bytes: binary, path: string>, which no field"),
        (["odd", "--columns", "grid"], 3, "the column 'grid' is "),
        (["odd", "--columns", "dict"], 3, "'dict' is struct<a: int64>, which no field can hold"),
        (["good", "--cast", "label=int9"], 2, "good: --cast label=int9: the dtypes are"),
        (["null"], 3, "row 2: column 'n' is null"),
        (["nosplit", "--columns", "n", "--split", "column:s"], 3, "row 2: column 's' is null; --s"),
        (["noimage"], 3, "column 'i': the image cannot be used: it is null"),
        (
            ["good", "--columns", "x"],
            2,
            "--columns x: there is no such column; there are label, text",
        ),
        (["good", "--columns", "text", "--drop", "text"], 2, "--columns and --drop: give one of"),
        (["good", "--drop", "text,label"], 2, "--drop leaves no column"),
        (["good", "--split", "column:split"], 2, "has no such column to go by; it has label, text"),
        (["good", "--mode", "RGB", "--encoded"], 2, "--mode RGB: with --encoded the loader deci"),
    ],
)
def test_bad_input(data_prep, bad, here, args, code, words):
    err = data_prep.refused("huggingface", args[0], "OUT", *args[1:], "--workers", "1", code=code)
    assert words in err
    assert "Traceback" not in err
    assert not (here / "OUT" / "index.json").exists()
