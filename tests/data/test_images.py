import io
import os
import pickle
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.source import Source
from hpctrain.data.sources import images
from hpctrain.data.sources.images import Decoded, decode
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import DataError
from tests.data_prep.pictures import png
from tests.written import write_shards

rng = np.random.default_rng(0)
PIXELS = [rng.integers(0, 255, (8, 12, 3), dtype=np.uint8) for _ in range(9)]


def encoded(pixels, kind="PNG", mode=None, **options):
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return np.frombuffer(file.getvalue(), np.uint8)


def ragged(*files):
    return Ragged.of(list(files))


def smooth(height, width):
    """Return an image, uint8 (height, width, 3), that scaling changes little."""
    y, x = np.indices((height, width)) + 0.5
    channels = 255 * y / height, 255 * x / width, 128 + 0 * x
    return np.stack(channels, -1).astype(np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_applied(orientation, kind):
    turn = [None, 0, 3, 1, 5, 4, 6, 2][orientation - 1]  # the PIL.Image.Transpose that undoes it
    stored = smooth(40, 60)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(stored)
    want = np.asarray(image if turn is None else image.transpose(turn))
    file = encoded(stored, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    found = decode(ragged(file))  # the size is that of the upright image
    assert found.shape == (1, 3, *want.shape[:2])
    assert np.abs(found[0].transpose(1, 2, 0).astype(int) - want).max() < 12  # JPEG is not exact
    height, width = want.shape[0] // 2, want.shape[1] // 2
    small = decode(ragged(file), size=(height, width), fit="crop")[0].transpose(1, 2, 0)
    shrunk = np.asarray(Image.fromarray(want).resize((width, height), Image.Resampling.BILINEAR))
    assert np.abs(small.astype(int) - shrunk).max() < 16


@pytest.mark.parametrize("threads", [0, 3])
def test_what_was_encoded_without_loss(threads):
    files = ragged(*map(encoded, PIXELS))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        options = {"pool": pool if threads else None}
        found = decode(files, **options)
        assert found.dtype == np.uint8
        assert (found == np.stack(PIXELS).transpose(0, 3, 1, 2)).all()
        out = np.empty_like(found)
        assert decode(files, **options, out=out) is out
        assert (out == found).all()


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "RGB"])
def test_every_mode(mode):
    grey = np.repeat((np.arange(96).reshape(8, 12, 1) % 2 * 255).astype(np.uint8), 3, axis=2)
    found = decode(ragged(encoded(grey, mode=mode)))
    assert found.shape == (1, 3, 8, 12)
    assert (found[0] == grey[:, :, 0]).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("shape", [(256, 300), (300, 256), (40, 90), (32, 32), (1000, 33)])
def test_sizes(kind, shape):
    pixels = smooth(*shape)
    files = ragged(encoded(pixels, kind))
    stretched = decode(files, size=(32, 48), fit="stretch")[0].astype(int)
    y, x = (np.indices((32, 48)) + 0.5) / np.array([32, 48]).reshape(2, 1, 1)
    assert np.abs(stretched[0] - 255 * y).mean() < 4
    assert np.abs(stretched[1] - 255 * x).mean() < 4
    cropped = decode(files, size=(32, 48), fit="crop")[0].astype(int)
    scale = min(shape[0] / 32, shape[1] / 48)
    y = 0.5 + (y - 0.5) * 32 * scale / shape[0]
    x = 0.5 + (x - 0.5) * 48 * scale / shape[1]
    assert np.abs(cropped[0] - 255 * y).mean() < 4
    assert np.abs(cropped[1] - 255 * x).mean() < 4


PNG, JPEG = encoded(PIXELS[0]), encoded(PIXELS[0], "JPEG")
DEEP = np.frombuffer(png((8, 12), 16, 2, [bytes(72)] * 8), np.uint8)  # Pillow would cut it to RGB
GREAT = encoded(np.zeros((100, 200, 3), np.uint8))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (PNG[:0], " cannot be decoded: it is no JPEG, PNG or WebP, but 0 bytes"),
        (PNG[:20], " cannot be decoded: Truncated File Read"),
        (PNG[: len(PNG) // 2], "cannot be decoded: image file is truncated"),
        (JPEG[:-50], "cannot be decoded: image file is truncated"),
        (np.zeros(99, np.uint8), "it is no JPEG, PNG or WebP, but 99 bytes"),
        (encoded(PIXELS[0], "GIF"), "it is no JPEG, PNG or WebP"),
        (encoded(np.zeros((8, 12), np.uint16)), "more than 8 bits a channel (mode 'I;16')"),
        (DEEP, "more than 8 bits a channel (mode 'RGB')"),
        (GREAT, "its header says 100 x 200 pixels; at most 9,999 are decoded"),
        (encoded(PIXELS[0][:, :8]), "is 8 x 8, not 8 x 12: give a size, and fit 'crop'"),
    ],
)
def test_bad_images_are_named(monkeypatch, file, words):
    monkeypatch.setattr(images, "MAX_PIXELS", 9999)
    files = ragged(encoded(PIXELS[0]), file)
    with pytest.raises(DataError) as error:
        decode(files, samples=[3, 123_456])
    assert str(error.value).startswith("the image of sample 123456")
    assert words in str(error.value)


def test_a_bomb_is_not_decoded():
    """A PNG that claims 20,000 x 20,000 pixels raises our DataError, not an error of Pillow."""
    header = bytearray(encoded(PIXELS[0]))
    header[16:24] = (20_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    with pytest.raises(DataError, match="image of sample 0"):
        decode(ragged(np.frombuffer(bytes(header), np.uint8)))


class Files(Source):
    def __init__(self, files):
        self.files = files
        self.fields = {"image": Field("uint8", variable=True), "label": Field("int64")}

    def __len__(self):
        return len(self.files)

    def read(self, indices, out=None):
        label = np.asarray(indices)
        if out and "label" in out:
            out["label"][:] = label
            label = out["label"]
        return {"image": Ragged.of([self.files[i] for i in indices]), "label": label}


@pytest.mark.parametrize("threads", [1, 4])
def test_a_source_of_decoded_images(threads):
    source = Decoded(Files([encoded(p) for p in PIXELS]), "image", threads=threads)
    assert source.sample_ids(np.array([2, 0])) == [("Files", 2), ("Files", 0)]
    assert source.fields == {"image": Field("uint8", (3, 8, 12)), "label": Field("int64")}
    assert len(source) == 9
    for again in (source, pickle.loads(pickle.dumps(source))):
        rows = again.read(np.array([5, 0, 5]))
        wanted = np.stack([PIXELS[i] for i in (5, 0, 5)]).transpose(0, 3, 1, 2)
        assert (rows["image"] == wanted).all()
        assert rows["label"].tolist() == [5, 0, 5]


def test_a_damaged_image_in_shards(tmp_path):
    files = [encoded(p) for p in PIXELS]
    files[7] = files[7][:60]
    samples = {"image": files, "label": np.arange(9)}
    write_shards(tmp_path, [("train", samples)], max_bytes=1500)
    reader = Reader(tmp_path, "train")
    rows = Ragged.of([reader.read(np.array([i]))["image"][0] for i in range(9)])
    with pytest.raises(DataError, match="image of sample 7"):
        decode(rows)


@pytest.mark.parametrize("field", ["label", "picture"])
def test_a_field_without_images(field):
    with pytest.raises(DataError, match=r"holds no encoded images, .* image uint8\[\*\], label"):
        Decoded(Files([PNG]), field)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")  # from Python 3.12 on
def test_a_fork_decodes_too():
    source = Decoded(Files([encoded(p) for p in PIXELS]), "image")
    source.read(np.arange(9))
    assert [t for t in threading.enumerate() if t.name.startswith("hpctrain-images")]
    child = os.fork()
    if not child:
        ok = source.read(np.arange(9))["image"].shape == (9, 3, 8, 12)
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
