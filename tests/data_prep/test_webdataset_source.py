"""`data_prep webdataset` converts the samples of tar files."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.sources.images import decode
from tests.data_prep import read_back
from tests.data_prep.pictures import encoded

rng = np.random.default_rng(0)
PIXELS = [rng.integers(0, 255, (8, 12, 3), dtype=np.uint8) for _ in range(20)]


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def write(path, members, mode="w"):
    """Write a tar with members (name, content), and return its path.

    If the content is a TarInfo, such as a link, the member has no bytes.
    """
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                tar.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def of_kind(kind, linkname=""):
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, linkname
    return info


def members(ids, folder="a"):
    for i in ids:
        yield f"{folder}/{i:03d}.cls", f"{i % 7}\n".encode()
        yield f"{folder}/{i:03d}.depth.npy", npy(np.full((2, 3), i, np.float32))
        yield f"{folder}/{i:03d}.PNG", encoded(PIXELS[i])
        yield f"{folder}/{i:03d}.txt", f"täxt {i}".encode()


pytestmark = pytest.mark.usefixtures("here")


def check(rows, ids):
    assert (rows["image"] == np.stack([PIXELS[i] for i in ids]).transpose(0, 3, 1, 2)).all()
    assert rows["label"].tolist() == [i % 7 for i in ids]
    assert (rows["depth"] == np.array(ids, np.float32)[:, None, None]).all()
    assert rows["depth"].shape[1:] == (2, 3)
    assert [text.tobytes().decode() for text in rows["text"]] == [f"täxt {i}" for i in ids]


def test_fields_by_default(data_prep):
    write("0.tar", members(range(12)))
    write("1.tar.gz", members(range(12, 16), "b"), "w:gz")
    write("2.tar.xz", members(range(16, 20), "b"), "w:xz")
    code, out, err = data_prep("webdataset", "0.tar", "1.tar.gz", "2.tar.xz", "OUT")
    assert (code, err) == (0, "")
    assert "20 samples (train 20) in 3 shards" in out
    check(read_back.rows("OUT"), range(20))
    os.mkdir("tars")
    for name in ("0.tar", "1.tar.gz", "2.tar.xz"):
        os.rename(name, f"tars/{name}")
    assert data_prep("webdataset", "tars", "AGAIN", "--workers", 1)[0] == 0
    for path in Path("OUT").glob("*.h5"):
        assert path.read_bytes() == Path("AGAIN", path.name).read_bytes()


def test_fields_that_are_named(data_prep):
    def some():
        for i in range(4):
            yield (
                f"{i}.jpg" if i % 2 else f"{i}.png",
                encoded(PIXELS[i], "JPEG" if i % 2 else "PNG"),
            )
            content = {
                "text": f"c{i}",
                "n": i,
                "x": i / 3,
                "ok": i > 1,
                "box": [1, 2.5],
                "s": [1] * i,
            }
            yield f"{i}.json", json.dumps(content).encode()
            yield f"{i}.flac", bytes([i, i])
            yield f"{i}.other.txt", b"not taken"

    write("j.tar", some())
    options = ["image=jpg,png", "raw=flac:bytes", *(f"{k}=json:{k}" for k in ("text", "n", "x"))]
    options += ["ok=json:ok", "box=json:box", "s=json:s", "all=json:bytes"]
    fields = [word for option in options for word in ("--field", option)]
    code, _, err = data_prep("webdataset", "j.tar", "OUT", *fields, "--variable", "s", "--encoded")
    assert (code, err) == (0, "")
    rows = read_back.rows("OUT")
    assert (decode(rows["image"])[::2] == np.stack(PIXELS[:4:2]).transpose(0, 3, 1, 2)).all()
    assert [row.tobytes() for row in rows["raw"]] == [bytes([i, i]) for i in range(4)]
    assert [row.tobytes() for row in rows["text"]] == [b"c0", b"c1", b"c2", b"c3"]
    assert (rows["n"].tolist(), rows["x"].tolist()) == ([0, 1, 2, 3], [i / 3 for i in range(4)])
    assert (rows["ok"].tolist(), rows["box"].tolist()) == ([0, 0, 1, 1], [[1, 2.5]] * 4)
    assert [row.tolist() for row in rows["s"]] == [[], [1.0], [1.0, 1.0], [1.0, 1.0, 1.0]]
    assert json.loads(rows["all"][2].tobytes())["n"] == 2


def test_the_key_decides_the_split(data_prep):
    write("0.tar", members(range(20)))
    found = []
    for size in (8, 4):
        args = ("--split", "train=0.5,val=0.5", "--size", size)
        assert data_prep("webdataset", "0.tar", f"O{size}", *args)[0] == 0
        found.append(read_back.rows(f"O{size}", "val")["depth"][:, 0, 0].tolist())
    assert found[0] == found[1]


IMAGE = ("0.png", encoded(PIXELS[0]))
NEXT = ("1.png", encoded(PIXELS[1]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([IMAGE, ("../../1.png", of_kind(tarfile.SYMTYPE, "/etc/passwd"))],
         "member '../../1.png': it is a link to '/etc/passwd', no file"),
        ([IMAGE, ("1.png", of_kind(tarfile.LNKTYPE, "0.png"))], "it is a link to '0.png', no file"),
        ([IMAGE, ("dev", of_kind(tarfile.CHRTYPE))], "member 'dev': it is no file"),
        ([IMAGE, NEXT, IMAGE], "sample '0': it was there before"),
        ([IMAGE, NEXT, ("1.PNG", b"")], "member '1.PNG': the sample has this extension twice"),
        ([IMAGE, NEXT, ("1.jpg", b"")], "sample '1': it has two members .png, .jpg for 'image'"),
        ([IMAGE, ("1.txt", b"x")], "sample '1': it has no member .png, .avif, .bmp"),
        ([IMAGE, ("1.png", b"x")], "'1': .png: it is no JPEG, PNG or WebP"),
        ([IMAGE, ("1.png", encoded(PIXELS[0][:4]))], "has 4 x 12 pixels, the first image 8 x 12"),
        ([("0.cls", b"1"), ("1.cls", b"x")], "sample '1': .cls: 'x' is no whole number"),
        ([("0.cls", b"1"), ("1.cls", b"9" * 19)], "cannot be stored as int64 exactly"),
        ([("0.txt", b"1"), ("1.txt", b"\xff")], "sample '1': .txt: it is not UTF-8"),
        ([("0.npy", npy(np.ones(3))), ("1.npy", npy(np.ones(4)))],
         "field 'array': found float64[4], the field is float64[3]; --variable"),
        ([("0.npy", npy(np.ones(3))), ("1.npy", npy(np.ones(3))[:-8])], ".npy: no readable .npy"),
        ([("0.npy", npy(np.ones(3))), ("1.npy", npy(np.array([{}]), allow_pickle=True))],
         ".npy: no readable .npy: Object arrays"),
    ],
)  # fmt: skip
def test_bad_samples_are_named(data_prep, content, words):
    write("0.tar", content)
    err = data_prep.refused("webdataset", "0.tar", "OUT")
    assert words in err
    assert err.startswith("data_prep: 0.tar: ")
    assert data_prep("webdataset", "0.tar", "OUT", "--on-error", "skip")[0] == 0
    assert len(Path("OUT/problems.jsonl").read_text().splitlines()) == 1
    assert sorted(os.listdir()) == ["0.tar", "OUT"]  # nothing was extracted


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_a_tar_that_is_cut_off(data_prep, mode):
    whole = Path(write("whole", members(range(20)), mode)).read_bytes()
    for i, size in enumerate((0, 300, len(whole) // 2, len(whole) * 3 // 4)):
        Path("0.tar").write_bytes(whole[:size])
        code, _, err = data_prep("webdataset", "0.tar", "OUT")
        assert "the tar cannot be read" in err
        assert code == 3
        code = data_prep("webdataset", "0.tar", f"O{i}", "--on-error", "skip")[0]
        if code == 0:
            ids = read_back.rows(f"O{i}")["depth"][:, 0, 0].astype(int).tolist()
            check(read_back.rows(f"O{i}"), ids)
            assert ids == list(range(len(ids)))
            assert len(ids) < 20
        else:
            assert size <= 300 or mode != "w"


def test_a_tar_that_ends_without_its_end(data_prep):
    """A tar is cut between two members or has garbage there, which tarfile takes for the end."""
    whole = bytearray(Path(write("0.tar", members(range(20)))).read_bytes())
    with tarfile.open("0.tar") as tar:
        begin = tar.getmembers()[40].offset
    for content in (whole[:begin], whole[:begin] + b"x" * 512 + whole[begin + 512 :]):
        Path("0.tar").write_bytes(content)
        err = data_prep.refused("webdataset", "0.tar", "OUT")
        assert "0.tar: after the beginning of sample 'a/009': the tar cannot be read: cut" in err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nope.tar"], 3, "nope.tar cannot be read: No such file"),
        (["0.tar", "0.tar"], 2, "0.tar is given twice"),
        (["folder"], 3, "folder has no .tar files"),
        (["empty.tar"], 3, "empty.tar: there is no sample to use"),
        (["text.tar"], 3, "text.tar: the tar cannot be read"),
        (["json.tar"], 2, "members .png, .json, and .json has no field by default"),
        (["flac.tar"], 2, "such as --field NAME=flac:bytes"),
        (["both.tar"], 2, "the members .png and .jpg would both be the field 'image'"),
        (["0.tar", "--field", "x"], 2, "--field 'x': it is NAME=EXT,…"),
        (["0.tar", "--field", "x=png,cls"], 2, "with extensions of one kind"),
        (["0.tar", "--field", "x=flac"], 2, "or any as EXT:bytes"),
        (["0.tar", "--field", "x=png", "--field", "x=cls"], 2, "--field x is there twice"),
        (["0.tar", "--field", "x=webp"], 3, "sample '0': it has no member .webp for 'x'"),
        (["json.tar", "--field", "x=json:y"], 3, ".json: there is no key 'y'"),
        (["json.tar", "--field", "x=json:a"], 3, "field 'x': NoneType is neither real numbers"),
        (["0.tar", "--variable", "y"], 2, "--variable y: the fields are image"),
    ],
)
def test_what_cannot_be(data_prep, args, code, words):
    os.mkdir("folder")
    write("0.tar", [IMAGE])
    write("empty.tar", [("README", b"x")])
    write("json.tar", [IMAGE, ("0.json", b'{"a": null}')])
    write("flac.tar", [("0.flac", b"x")])
    write("both.tar", [IMAGE, ("0.jpg", encoded(PIXELS[0], "JPEG"))])
    Path("text.tar").write_text("hello")
    at = next((i for i, arg in enumerate(args) if arg.startswith("--")), len(args))
    assert words in data_prep.refused("webdataset", *args[:at], "OUT", *args[at:], code=code)
    assert not Path("OUT/index.json").exists()
