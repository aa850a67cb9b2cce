"""`data_prep images` converts folders of images and lists of images."""

import csv
import io
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import Unusable, field_of, fitted
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.sources.images import decode
from tests.data_prep import read_back
from tests.data_prep.pictures import encoded, png

rng = np.random.default_rng(0)


def noise(height, width, channels=3):
    return rng.integers(0, 255, (height, width, channels), dtype=np.uint8)


def smooth(height, width):
    y, x = np.indices((height, width)) + 0.5
    return np.stack([255 * y / height, 255 * x / width, 128 + 0 * x], -1).astype(np.uint8)


def deep(colour, row):
    """Return a PNG of 2 x 2 pixels of 16 bits, all rows the same."""
    return png((2, 2), 16, colour, [row] * 2)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Write 100 digits into a folder for each class, with files that are ignored."""
    monkeypatch.chdir(tmp_path)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    for i in range(100):
        path = Path(f"digits/{bunch.target[i]}/{i:03d}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded((bunch.images[i] * 15).astype(np.uint8)))
    Path("digits/.DS_Store").write_text("x")
    Path("digits/3/notes.txt").write_text("x")
    Path("digits/.thumbnails").mkdir()
    Path("digits/.thumbnails/0.png").write_bytes(encoded(noise(8, 8)))
    return bunch


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Make two folders of one image each; return a function that replaces the second image."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path("src", name).mkdir(parents=True)
        Path("src", name, "1.png").write_bytes(encoded(noise(8, 12)))

    def replace(content, name="1.png"):
        Path("src/b/1.png").unlink()
        Path("src/b", name).write_bytes(content)

    return replace


def test_folders_are_classes(digits, data_prep):
    code, out, err = data_prep("images", "digits", "OUT", "--mode", "L", "--workers", 1)
    assert code == 0
    assert err == "3 files are no images and are ignored, such as '.DS_Store'\n"
    assert "100 samples (train 100) in 1 shard" in out
    rows = read_back.rows("OUT")
    order = sorted(range(100), key=lambda i: (digits.target[i], i))
    assert (rows["label"] == digits.target[order]).all()
    assert (rows["image"][:, 0] == (digits.images[order] * 15).astype(np.uint8)).all()
    about = Index.load(Path("OUT")).provenance["source"]
    assert (about["ignored"], about["first_ignored"]) == (3, ".DS_Store")
    assert data_prep("images", "digits", "OUT", "--mode", "L", "--quiet")[::2] == (0, "")
    assert data_prep("images", "digits", "OUT", "--mode", "RGB")[0] == 3  # OUT has another data set


def test_the_names_of_the_classes(digits, data_prep):
    assert data_prep("images", "digits", "OUT", "--mode", "L", "--shard-size", "1KB")[0] == 0
    index = Index.load(Path("OUT"))
    assert list(index.categories["label"]) == [str(digit) for digit in range(10)]
    assert len(index.shards) > 5
    assert data_prep("images", "digits", "NONE", "--mode", "L", "--no-labels")[0] == 0
    assert not Index.load(Path("NONE")).categories


def test_out_may_be_below_src(digits, data_prep):
    for words in ("100 samples", "already holds this data set"):
        code, out, _ = data_prep("images", "digits", "digits/OUT", "--mode", "L")
        assert code == 0
        assert words in out


def test_the_split_does_not_depend_on_the_size(digits, data_prep):
    found = []
    for size in (8, 4):
        options = ("--mode", "L", "--split", "train=0.5,val=0.5", "--size", size, "--workers", 1)
        assert data_prep("images", "digits", f"O{size}", *options)[0] == 0
        found.append(read_back.rows(f"O{size}", "val")["label"].tolist())
    assert found[0] == found[1]


def test_encoded_files_stay_as_they_are(two, data_prep):
    two(encoded(noise(20, 30), "JPEG"), "1.jpg")
    assert data_prep("images", "src", "OUT", "--encoded")[0] == 0
    rows = read_back.rows("OUT")
    assert rows["image"][0].tobytes() == Path("src/a/1.png").read_bytes()
    assert rows["image"][1].tobytes() == Path("src/b/1.jpg").read_bytes()
    assert decode(rows["image"], size=(4, 4), fit="crop").shape == (2, 3, 4, 4)
    assert data_prep("images", "src", "SMALL", "--encoded", "--size", "8x12")[0] == 0
    small = read_back.rows("SMALL")
    # This image had the target size already, so its bytes are kept.
    assert small["image"][0].tobytes() == Path("src/a/1.png").read_bytes()
    assert decode(small["image"]).shape == (2, 3, 8, 12)
    assert Image.open(io.BytesIO(small["image"][1].tobytes())).format == "JPEG"


def write_list(path, rows):
    path = Path(path)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_lists(digits, data_prep):
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rows = [
        {
            "file": f"{digits.target[i]}/{i:03d}.png",
            "what": names[digits.target[i]],
            "fold": "val" if i % 4 == 0 else "train",
        }
        for i in range(100)
    ]
    path = write_list("digits/list.csv", rows)
    columns = ("--path-column", "file", "--label-column", "what", "--split", "column:fold")
    assert data_prep("images", path, "OUT", "--mode", "L", "--workers", 1, *columns)[0] == 0
    for split, which in (("train", [i for i in range(100) if i % 4]), ("val", range(0, 100, 4))):
        found = read_back.rows("OUT", split)
        assert (found["image"][:, 0] == digits.images[which].astype(np.uint8) * 15).all()
        assert [sorted(names)[k] for k in found["label"]] == [
            names[digits.target[i]] for i in which
        ]


def test_labels_that_are_numbers_stay_numbers(digits, data_prep):
    rows = [{"path": f"{digits.target[i]}/{i:03d}.png", "label": i - 3} for i in range(100)]
    path = write_list("digits/list.csv", rows)
    assert data_prep("images", path, "OUT", "--mode", "L", "--workers", 1)[0] == 0
    assert read_back.rows("OUT")["label"].tolist() == [i - 3 for i in range(100)]


PATH = {"path": "a/1.png", "label": "x"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"path": "../src/a/1.png", "label": 1}], "line 2: '../src/a/1.png' leads out of src"),
        ([{"path": "/etc/x.png", "label": 1}], "'/etc/x.png' leads out of src; --allow-outside"),
        ([{"path": "a/1.png"}], "has no column 'label'; it has path"),
        ([PATH, {"path": "b/1.png"}], "line 3: it has no 'label'"),
        ([PATH, {"path": "./a/../a/1.png", "label": "y"}], "line 3: './a/../a/1.png' is in line 2"),
        ([{"path": "b/2.png", "label": 1}], "'b/2.png' cannot be read: No such file"),
        ([{"path": "b", "label": 1}], "'b' is no file"),
        ([{"path": "", "label": 1}], "it has no 'path'"),
    ],
)
def test_bad_lists(two, data_prep, rows, words):
    path = write_list("src/list.csv", rows)
    assert words in data_prep.refused("images", path, "OUT", code=2 if "no column" in words else 3)
    assert not Path("OUT").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("l.csv", b"path,label\na/1.png\n", "line 2 has 1 cells, the header has 2"),
        ("l.csv", b"", "has no column 'path'; it has none"),
        ("l.csv", b"path,path,label\n", "has two columns 'path'"),
        ("l.csv", b"path,label\n\xff,1\n", "is not UTF-8"),
        ("l.csv", b"path,label\n", "has no images"),
        ("l.csv", b'path,label\n"a,1\n', "line 2: unexpected end of data"),
        ("l.jsonl", b"{}", "a list of images is .csv"),
    ],
)
def test_damaged_lists(two, data_prep, name, content, words):
    Path(name).write_bytes(content)
    code, _, err = data_prep("images", name, "OUT")
    assert words in err
    assert code in (2, 3)


def test_a_list_may_lead_outside_when_asked(two, data_prep, tmp_path):
    rows = [{"path": f"{tmp_path}/src/a/1.png", "label": 1}, {"path": "../src/b/1.png", "label": 0}]
    Path("lists").mkdir()
    path = write_list("lists/l.csv", rows)
    assert data_prep("images", path, "OUT", "--allow-outside")[0] == 0
    assert read_back.rows("OUT")["label"].tolist() == [1, 0]


@pytest.mark.parametrize("link", ["a/3.png", "a/sub"])
def test_a_link_out_of_the_folder_is_refused(two, data_prep, tmp_path, link):
    Path("private").mkdir()
    shutil.copy("src/a/1.png", "private/1.png")
    target = "private/1.png" if link.endswith(".png") else "private"
    Path("src", link).symlink_to(tmp_path / target)
    name = link if link.endswith(".png") else f"{link}/1.png"
    path = write_list("src/list.csv", [{"path": name, "label": 1}])
    for source in ("src", path):
        err = data_prep.refused("images", source, "OUT")
        assert "is a link that leads out of the folder, to" in err
        assert data_prep("images", source, "OUT", "--allow-outside", "--overwrite")[0] == 0
        shutil.rmtree("OUT")


def test_what_cannot_be_used_is_left_out_and_reported(two, data_prep):
    rows = [PATH, {"path": "../x", "label": "x"}, {"path": "b/1.png", "label": "y"}, PATH]
    Path("src/b/1.png").write_bytes(encoded(noise(9, 12)))
    path = write_list("src/list.csv", rows)
    assert data_prep("images", path, "OUT", "--on-error", "skip")[0] == 0
    assert len(read_back.rows("OUT")["label"]) == 1
    problems = [json.loads(line) for line in Path("OUT/problems.jsonl").read_text().splitlines()]
    assert [problem["record"] for problem in problems] == ["line 3", "line 5", "line 4 of list.csv"]
    assert problems[2]["file"] == "src/b/1.png"
    assert "it has 9 x 12 pixels, the first image 8 x 12" in problems[2]["reason"]


PHOTO = encoded(smooth(64, 64), "JPEG")
PNG = encoded(noise(8, 12))
DEEP = deep(2, bytes(12))
FRAMES = [Image.fromarray(noise(8, 12)) for _ in range(3)]
MOVING = {"save_all": True, "append_images": FRAMES[1:]}


@pytest.mark.parametrize(
    ("options", "content", "words"),
    [
        ({}, b"", "it is no JPEG, PNG or WebP, but 0 bytes; read it in a function"),
        *(
            ({}, encoded(noise(8, 12), kind), "it is no JPEG, PNG or WebP")
            for kind in ("PPM", "TIFF", "BMP", "GIF", "JPEG2000", "AVIF")
        ),
        ({}, PHOTO[:-200], "it cannot be decoded: image file is truncated"),
        ({}, PHOTO[:100], "cannot be"),
        ({}, PNG[:-30], "it is cut off: the end of the PNG is missing"),
        ({}, PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:], "it is damaged: the checksum of its part"),
        ({}, encoded(noise(8, 12).astype(np.uint16)[:, :, 0]), "more than 8 bits a channel"),
        ({}, DEEP, r"more than 8 bits a channel \(Pillow's mode RGB\): --mode L16"),
        ({}, deep(6, bytes(16)), r"more than 8 bits a channel \(Pillow's mode RGBA\)"),
        ({}, encoded(noise(8, 12, 4)), "it has transparent pixels: --mode RGBA keeps them"),
        ({}, png((9_000, 9_000), 8, 2, [bytes(6)] * 10), "its header says 9000 x 9000 pixels"),
        ({}, encoded(FRAMES[0], "PNG", **MOVING), "it is an animation of 3 images; save each"),
        ({}, encoded(FRAMES[0], "WEBP", **MOVING), "it is an animation of 3 images; save each"),
        ({"encoded": True}, PHOTO[:-2], "it is cut off: the end of the JPEG is missing"),
        ({"encoded": True}, PNG[:-13], "it is cut off: the end of the PNG is missing"),
        ({"encoded": True}, DEEP, "more than 8 bits a channel, which the loader does not take"),
        ({"mode": "L16"}, PNG, "it has 8 bits a channel, --mode L16 takes 16"),
        ({"mode": "L16"}, DEEP, "it is not grey of 16 bits"),
    ],
)
def test_images_that_cannot_be_used(options, content, words):
    with pytest.raises(Unusable, match=words):
        Pixels(**options).sample(content)


@pytest.mark.parametrize("kind", ["JPEG", "progressive", "thumbnail", "PNG", "WEBP"])
def test_what_stays_encoded_can_be_decoded_wherever_it_was_cut(kind):
    options = {"progressive": True} if kind == "progressive" else {}
    if kind == "thumbnail":  # a JPEG whose header contains another JPEG
        exif = Image.Exif()
        exif[0x010E] = "x"
        options = {"exif": exif.tobytes() + encoded(smooth(12, 16), "JPEG")}
    content = encoded(smooth(24, 32), kind if kind in ("PNG", "WEBP") else "JPEG", **options)
    assert Pixels(encoded=True).sample(content).tobytes() == content
    taken = 0
    for size in range(len(content)):
        with suppress(Unusable):
            taken += decode(Ragged.of([Pixels(encoded=True).sample(content[:size])])).size > 0
    assert taken < 5  # some cuts remove only the last CRC of a PNG


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "YCbCr"])
def test_modes_become_rgb(mode):
    grey = np.repeat((np.arange(96).reshape(8, 12, 1) % 2 * 255).astype(np.uint8), 3, axis=2)
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    found = Pixels().sample(encoded(Image.fromarray(grey).convert(mode), kind, quality=100))
    assert np.abs(found.astype(int) - grey.transpose(2, 0, 1)).max() < 6


def test_the_first_of_a_phones_images():
    content = encoded(FRAMES[0], "MPO", **MOVING, quality=100)
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "MPO"
        first = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    assert (Pixels().sample(content) == first).all()
    assert Pixels(encoded=True).sample(content).tobytes() == content


def test_sixteen_bits():
    values = np.arange(0, 65536, 683, np.uint16).reshape(8, 12)
    found = Pixels(mode="L16").sample(encoded(values))
    assert found.dtype == np.uint16
    assert (found[0] == values).all()
    small = Pixels(mode="L16", size=(4, 6)).sample(encoded(values))
    assert small.shape == (1, 4, 6)
    assert (np.diff(small[0].astype(int), axis=0) > 0).all()


def test_transparent_pixels():
    pixels = noise(8, 12, 4)
    content = encoded(pixels)
    assert (Pixels(mode="RGBA").sample(content) == pixels.transpose(2, 0, 1)).all()
    hole = encoded(Image.new("P", (12, 8)), transparency=0)
    for kept in (Pixels(), Pixels(encoded=True)):
        with pytest.raises(Unusable, match="transparent pixels"):
            kept.sample(hole)
    solid = pixels | np.array([0, 0, 0, 255], np.uint8)
    for kind in ("PNG", "WEBP"):
        opaque = encoded(solid, kind, **({"lossless": True} if kind == "WEBP" else {}))
        assert Pixels(encoded=True).sample(opaque).tobytes() == opaque
        assert (Pixels().sample(opaque) == solid[..., :3].transpose(2, 0, 1)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_applied(orientation):
    """The sample has the orientation that a viewer shows: its white corner is at the top left."""
    turn = [None, 0, 3, 1, 5, 4, 6, 2][orientation - 1]  # how a viewer turns the image
    upright = np.zeros((64, 96, 3), np.uint8)
    upright[:32, :48] = 255
    image = Image.fromarray(upright)
    inverse = {None: None, 0: 0, 1: 1, 3: 3, 5: 5, 4: 2, 6: 6, 2: 4}[turn]
    stored = image if inverse is None else image.transpose(Image.Transpose(inverse))
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG", "WEBP"):
        content = encoded(stored, kind, exif=exif)
        found = Pixels().sample(content)
        height, width = found.shape[1:]
        assert (height * 3, width * 2) == (width * 2, height * 3)
        assert found[:, : height // 3, : width // 3].min() > 200, kind
        assert found[:, -height // 3 :].max() < 50, kind
        assert found[:, :, -width // 3 :].max() < 50, kind


@pytest.mark.parametrize("shape", [(256, 300), (300, 256), (40, 90), (32, 32), (500, 33)])
def test_resizing(shape):
    content = encoded(smooth(*shape))
    y, x = (np.indices((32, 48)) + 0.5) / np.array([32, 48]).reshape(2, 1, 1)
    stretched = Pixels(size=(32, 48), resize="stretch").sample(content).astype(int)
    assert np.abs(stretched[0] - 255 * y).mean() < 4
    assert np.abs(stretched[1] - 255 * x).mean() < 4
    scale = min(shape[0] / 32, shape[1] / 48)
    cropped = Pixels(size=(32, 48)).sample(content).astype(int)
    assert np.abs(cropped[0] - 255 * (0.5 + (y - 0.5) * 32 * scale / shape[0])).mean() < 4
    assert np.abs(cropped[1] - 255 * (0.5 + (x - 0.5) * 48 * scale / shape[1])).mean() < 4
    padded = Pixels(size=(32, 48), resize="pad").sample(content)
    inner = np.argwhere(padded[2] != 0)
    (top, left), (bottom, right) = inner.min(0), inner.max(0) + 1
    assert abs((bottom - top) / (right - left) - shape[0] / shape[1]) < 0.15 * shape[0] / shape[1]
    assert max((bottom - top) / 32, (right - left) / 48) == 1
    assert (abs(top - (32 - bottom)) < 2) & (abs(left - (48 - right)) < 2)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["flat"], 3, "flat/1.png is not in a folder for its class; --no-labels"),
        (["empty"], 3, "empty has no images"),
        (["nope"], 3, "nope does not exist"),
        (["splits"], 2, "splits, it seems. --split column:folder"),
        (["hole"], 3, "hole/b has no files of this kind, so it is no class"),
        (["loop"], 3, "is a link that leads back"),
        (["broken"], 3, "broken/a/1.png cannot be read: No such file"),
        (["src", "--split", "column:fold"], 2, "a folder of images has column:folder"),
        (["src", "--split", "column:folder"], 3, "not in a folder for its split and its class"),
        (["src", "--size", "8x"], 2, "--size '8x': height and width in pixels"),
        (["src", "--size", "0"], 2, "--size '0'"),
        (["src", "--encoded", "--mode", "L"], 2, "with --encoded the loader decides it"),
        (["src", "--encoded", "--size", "8", "--mode", "L16"], 2, "the loader decodes 8 bits"),
        (["src", "--mode", "CMYK"], 2, "invalid choice"),
    ],
)
def test_folders_and_options_that_cannot_be(two, data_prep, args, code, words):
    for name in ("flat/1.png", "splits/train/a/1.png", "splits/val/a/1.png", "hole/a/1.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(encoded(noise(8, 12)))
    for name in ("empty", "hole/b", "loop/a", "broken/a"):
        Path(name).mkdir(parents=True)
    os.symlink("../../loop", "loop/a/again")
    os.symlink("nowhere", "broken/a/1.png")
    assert words in data_prep.refused("images", args[0], "OUT", *args[1:], code=code)
    assert not Path("OUT").exists()


def test_splits_by_folder_and_by_file(tmp_path, monkeypatch, data_prep):
    monkeypatch.chdir(tmp_path)
    for split, label, i in (("train", "b", 1), ("train", "b", 2), ("val", "a", 3), ("val", "b", 4)):
        path = Path("src", split, label, f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(np.full((8, 8, 3), i, np.uint8)))
    assert data_prep("images", "src", "OUT", "--split", "column:folder")[0] == 0
    assert read_back.rows("OUT")["label"].tolist() == [1, 1]
    assert read_back.rows("OUT", "val")["label"].tolist() == [0, 1]
    split = "file:even=[24].png,odd=[13].png"
    assert data_prep("images", "src", "O2", "--no-labels", "--split", split)[0] == 0
    assert read_back.rows("O2", "even")["image"][:, 0, 0, 0].tolist() == [2, 4]
    assert read_back.rows("O2", "odd")["image"][:, 0, 0, 0].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        (2.5, Field("int64"), "float64 2.5 cannot be stored as int64 exactly"),
        (2**53 + 1, Field("float64"), "cannot be stored as float64 exactly"),
        (2**63, Field("int64"), "cannot be stored as int64 exactly"),
        (2**70, Field("int64"), "neither real numbers"),
        (-1, Field("uint8"), "int64 -1 cannot be stored as uint8"),
        (300, Field("uint8"), "int64 300 cannot be stored as uint8"),
        (float("nan"), Field("int64"), "nan cannot be stored as int64"),
        (1j, Field("float64"), "dtype complex128 is neither"),
        ([2**53 + 1, 0.5], Field("float64", (2,)), "9007199254740993 among floats"),
        ([[1], [1, 2]], Field("int64", (2,)), "is no array"),
        (None, Field("int64"), "NoneType is neither real numbers, text nor bytes"),
        (["a"], Field("int64", (1,)), "is neither real numbers, text nor bytes"),
        ("\udcff", Field("uint8", variable=True), "no Unicode"),
        (np.ma.masked_equal([1, 2], 1), Field("int64", (2,)), "masked values"),
        ([1, 2, 3], Field("int64", (2,)), "found int64[3], the field is int64[2]; --variable"),
    ],
)
def test_values_that_do_not_fit(value, field, words):
    with pytest.raises(Unusable) as error:
        fitted(value, field)
    assert words in str(error.value)


def test_values_that_fit():
    assert fitted(2.0, Field("int64")).dtype == np.int64
    assert np.isnan(fitted(float("nan"), Field("float32")))
    assert fitted([], Field("float32", (3,), variable=True)).shape == (0, 3)
    assert field_of("x") == field_of(b"x") == Field("uint8", variable=True)
    assert field_of(True) == Field("uint8")
    with pytest.raises(Unusable, match="dtype uint64 is not supported"):
        field_of(np.uint64(3))
