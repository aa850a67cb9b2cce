"""Image files for tests."""

import io
import struct
import zlib

from PIL import Image


def encoded(image, kind="PNG", **options):
    """Return an array or an image of Pillow as the content of a file."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(size, depth, colour, rows, **chunks):
    """Return a PNG of any bit depth and claimed size (height, width); Pillow cannot write them all.

    `colour` is the colour type, `rows` are the bytes of each row, and `chunks` go before them.
    """

    def chunk(kind, content):
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", size[1], size[0], depth, colour, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    more = b"".join(chunk(kind.encode(), content) for kind, content in chunks.items())
    begin = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + more
    return begin + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
