"""`data_prep compress` prints the sizes that gzip and xz reach for a field."""

import gzip
import json
import lzma

import numpy as np

from data_prep.tools.compress import compressed
from hpctrain.data.sources.reader import Reader


def test_sizes_are_those_of_gzip_and_xz():
    text = b"".join(b"line %d of a text\n" % (i * i % 97) for i in range(5000))
    parts = [text[:1], text[1:40_000], b"", text[40_000:]]
    nbytes, sizes = compressed(parts)
    assert nbytes == len(text)
    assert sizes == {
        "gzip -9": len(gzip.compress(text, 9)),
        "xz -9e": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }


def test_the_command(tmp_path, data_prep):
    (tmp_path / "in").mkdir()
    for i in range(30):
        (tmp_path / "in" / f"{i}.txt").write_text(f"file {i}\n" * (i + 1))
    out = tmp_path / "out"
    data_prep("text", tmp_path / "in", out, "--split", "train=0.5,val=0.5", "--quiet")
    code, found, _ = data_prep("compress", out, "--field", "tokens", "--json")
    rows = Reader(out, "val").read(np.arange(len(Reader(out, "val"))))["tokens"]
    content = rows.values.tobytes()
    found = json.loads(found)
    assert (code, found["bytes"]) == (0, len(content))
    size = len(gzip.compress(content, 9))
    assert found["compressed"]["gzip -9"] == size
    assert found["bits_per_byte"]["gzip -9"] == 8 * size / len(content)
    code, text, _ = data_prep("compress", out, "-f", "tokens", "--split", "train")
    assert code == 0
    assert "gzip -9" in text
    assert "bits per byte" in text
    code, _, err = data_prep("compress", out)
    assert (code, err) == (2, "data_prep: --field 'text': there are tokens\n")
