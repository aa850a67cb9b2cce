"""Image formats beside JPEG and PNG: several pages, and colours of 16 bits."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.formats.images.image_files import check_depth
from data_prep.formats.images.pixels import Pixels
from data_prep.formats.samples import Unusable
from hpctrain.data.sources.reader import Reader
from hpctrain.shards.index import Index
from tests.data_prep.pictures import encoded, png

rng = np.random.default_rng(0)
DEEP = rng.integers(0, 2**16, (5, 7, 3), dtype=np.uint16)
PAGES = [rng.choice([0, 90, 255], (8, 12, 3)).astype(np.uint8) for _ in range(3)]
FLAT = np.stack(PAGES).transpose(0, 3, 1, 2)


def paged(kind, pages=PAGES, **options):
    more = [Image.fromarray(page) for page in pages[1:]]
    return encoded(pages[0], kind, save_all=True, append_images=more, **options)


def tiff16(values, order, packed):
    """Return a TIFF of 16 bits a channel, which Pillow cannot write."""
    height, width, channels = values.shape
    data = values.astype(f"{order}u2").tobytes()
    data = zlib.compress(data) if packed else data
    data += b"\0" * (len(data) % 2)
    tags = [
        *((256, width), (257, height), (258, 0), (259, 8 if packed else 1), (262, 2), (273, 8)),
        *((277, channels), (278, height), (279, len(data)), (338, 2)),
    ]
    tags = tags if channels == 4 else tags[:-1]
    place = 8 + len(data)
    end = place + 2 + 12 * len(tags) + 4
    file = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", place) + data
    file += struct.pack(f"{order}H", len(tags))
    for tag, value in tags:
        if tag == 258:
            file += struct.pack(f"{order}HHII", tag, 3, channels, end)
        elif tag in (273, 279):
            file += struct.pack(f"{order}HHII", tag, 4, 1, value)
        else:
            file += struct.pack(f"{order}HHIHH", tag, 3, 1, value, 0)
    return file + bytes(4) + struct.pack(f"{order}{channels}H", *[16] * channels)


def png16(values, **chunks):
    height, width, channels = values.shape
    rows = [row.astype(">u2").tobytes() for row in values]
    return png((height, width), 16, {2: 4, 3: 2, 4: 6}[channels], rows, **chunks)


@pytest.mark.parametrize("kind", ["GIF", "JPEG2000", "TIFF"])
def test_a_format_without_loss_gives_the_same_pixels(kind):
    image = FLAT[0].transpose(1, 2, 0)
    content = encoded(image, kind)
    np.testing.assert_array_equal(Pixels().sample(content), FLAT[0])
    for part in (0.3, 0.6, 0.9):
        with pytest.raises(Unusable):
            Pixels().sample(content[: int(part * len(content))])


def test_avif():
    smooth = np.indices((32, 48)).sum(0)[..., None].repeat(3, 2).astype(np.uint8)
    content = encoded(smooth, "AVIF", quality=95)
    found = Pixels().sample(content)
    assert np.abs(found.astype(int) - smooth.transpose(2, 0, 1)).max() <= 3
    with pytest.raises(Unusable, match="Truncated data"):
        Pixels().sample(content[:-5])
    high = content.find(b"av1C") + 6  # set the bit `high_bitdepth`
    deep = content[:high] + bytes([content[high] | 0x40]) + content[high + 1 :]
    with pytest.raises(Unusable, match="10 bits a channel or more, and Pillow would change"):
        check_depth("AVIF", deep)


def test_tiff_of_16_bits_in_which_0_is_white():
    grey = DEEP[:, :, 0]
    content = bytearray(encoded(grey, "TIFF"))
    at = content.index(struct.pack("<HHI", 262, 3, 1)) + 8  # the entry of the colours
    assert content[at] == 1
    content[at] = 0
    np.testing.assert_array_equal(Pixels(mode="L16").sample(bytes(content)), 65535 - grey[None])


def test_a_damaged_tiff_is_refused_in_one_line(tmp_path, monkeypatch, data_prep, caplog):
    monkeypatch.chdir(tmp_path)
    Path("in/a").mkdir(parents=True)
    content = bytearray(encoded(PAGES[0], "TIFF"))
    at = content.index(struct.pack("<HHI", 277, 3, 1)) + 8  # the entry of the samples per pixel
    content[at : at + 2] = struct.pack("<H", 2048)
    Path("in/a/x.tif").write_bytes(content)
    err = data_prep.refused("images", "in", "OUT", "--workers", 1)
    assert "in/a/x.tif" in err
    assert not caplog.records  # Pillow would log another line


def test_libtiff_prints_nothing_of_its_own(capfd):
    pixels = (np.arange(64 * 64 * 3) % 251).astype(np.uint8).reshape(64, 64, 3)
    content = bytearray(encoded(pixels, "TIFF", compression="tiff_lzw"))
    content[60:400] = b"\xff" * 340
    with pytest.raises(Unusable, match="it cannot be decoded: decoder error"):
        Pixels(mode="RGB").sample(bytes(content))
    assert capfd.readouterr().err == ""


def test_jpeg2000_of_more_bits():
    grey = DEEP[:, :, 0]
    content = encoded(grey, "JPEG2000")
    np.testing.assert_array_equal(Pixels(mode="L16").sample(content), grey[None])
    with pytest.raises(Unusable, match="more than 8 bits a channel"):
        Pixels(mode="L").sample(content)
    depth = content.find(b"\xff\x4f\xff\x51") + 42
    assert content[depth] == 15  # the bits less one
    twelve = content[:depth] + b"\x0b" + content[depth + 1 :]
    with pytest.raises(Unusable, match="it has 12 bits a channel or more"):
        Pixels(mode="L16").sample(twelve)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GIF", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
        ("PNG", {}),
    ],
)
def test_pages(kind, options):
    content = paged(kind, **options)
    with pytest.raises(Unusable, match="3 images; --pages first takes the first one, --pages all"):
        Pixels().sample(content)
    np.testing.assert_array_equal(Pixels(pages="first").sample(content), FLAT[0])
    every = Pixels(pages="all")
    found = every.sample(content)
    np.testing.assert_array_equal(found, FLAT)
    assert str(every.field_of(found)) == "uint8[*, 3, 8, 12]"
    assert Pixels(pages="all", size=(4, 4)).sample(content).shape == (3, 3, 4, 4)
    with pytest.raises(Unusable, match="3 pages of 8 x 12 pixels; --max-pixels is 200"):
        Pixels(pages="all", max_pixels=200).sample(content)


def test_pages_of_16_bits_and_pages_that_differ():
    grey = [DEEP[:, :, i] for i in range(3)]
    content = paged("TIFF", grey)
    found = Pixels(mode="L16", pages="all").sample(content)
    np.testing.assert_array_equal(found, np.stack(grey)[:, None])
    with pytest.raises(Unusable, match="it has 4 x 12 pixels, the first page 8 x 12"):
        Pixels(pages="all").sample(paged("TIFF", [PAGES[0], PAGES[1][:4]]))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("packed", [False, True])
def test_colours_of_16_bits_of_tiff(order, packed):
    content = tiff16(DEEP, order, packed)
    np.testing.assert_array_equal(Pixels(mode="RGB16").sample(content), DEEP.transpose(2, 0, 1))
    with pytest.raises(Unusable, match="--mode L16 takes grey of 16 bits, --mode RGB16 colours"):
        Pixels().sample(content)


def test_colours_of_16_bits_of_png():
    opaque = np.full_like(DEEP[:, :, :1], 2**16 - 1)
    expected = DEEP.transpose(2, 0, 1)
    deep = Pixels(mode="RGB16")
    for values in (DEEP, np.concatenate([DEEP, opaque], 2)):
        np.testing.assert_array_equal(deep.sample(png16(values)), expected)
    turned = Image.Exif()
    turned[0x0112] = 3  # half a turn
    content = png16(DEEP, eXIf=turned.tobytes().removeprefix(b"Exif\0\0"))
    np.testing.assert_array_equal(deep.sample(content), expected[:, ::-1, ::-1])
    even = np.full((6, 9, 3), 40_000, np.uint16)
    small = Pixels(mode="RGB16", size=(3, 3)).sample(png16(even))
    assert small.dtype == np.uint16
    assert (small == 40_000).all()
    for values, why in (
        (np.concatenate([DEEP, DEEP[:, :, :1]], 2), "it has transparent pixels"),
        (DEEP[:, :, :2], "a PNG of Pillow's mode .*; --mode RGB16 takes TIFF and PNG"),
    ):
        with pytest.raises(Unusable, match=why):
            deep.sample(png16(values))
    with pytest.raises(Unusable, match="it has 8 bits a channel, --mode RGB16 takes 16"):
        deep.sample(encoded(PAGES[0], "PNG"))


def test_a_folder_of_animations(data_prep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(["a/one.gif", "b/two.tiff", "b/still.png"]):
        Path("src", name).parent.mkdir(parents=True, exist_ok=True)
        kind = name.rpartition(".")[2].upper()
        content = encoded(PAGES[0], kind) if kind == "PNG" else paged(kind, PAGES[: 2 + i])
        Path("src", name).write_bytes(content)
    err = data_prep.refused("images", "src", "NO")
    assert "src/a/one.gif: it is an animation or has several pages: 2 images" in err
    assert data_prep("images", "src", "OUT", "--pages", "all", "--workers", "1")[0] == 0
    assert str(Index.load(Path("OUT")).fields["image"]) == "uint8[*, 3, 8, 12]"
    found = Reader("OUT", "train").read(np.arange(3))
    assert [len(found["image"][i]) for i in range(3)] == [2, 1, 3]
    np.testing.assert_array_equal(found["image"][2], FLAT)
    assert data_prep("images", "src", "FIRST", "--pages", "first", "--workers", "1")[0] == 0
    first = Reader("FIRST", "train").read(np.arange(3))["image"]
    assert (first == FLAT[0]).all()
    err = data_prep.refused("images", "src", "NO", "--pages", "all", "--encoded", code=2)
    assert "--pages all: the loader decodes one page" in err
