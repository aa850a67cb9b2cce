"""`data_prep inspect` describes a data set."""

import numpy as np
import pytest

from data_prep.console import size
from hpctrain.data.shards.index import Index
from tests.written import write_shards

TEXTS = ["plain", "ä€猫" * 100, "", "line\n\x1b[31m[red]", "\0zero"]


@pytest.fixture
def folder(tmp_path):
    n = len(TEXTS)
    batch = {
        "image": np.arange(n * 48, dtype=np.uint8).reshape(n, 3, 4, 4),
        "label": np.arange(n),
        "pair": np.arange(2 * n).reshape(n, 2) / 4,
        "field": np.where(np.arange(n * 64).reshape(n, 8, 8) == 3, np.nan, 1.5),
        "bad": np.full((n, 20), np.inf, np.float32),
        "text": [np.frombuffer(text.encode(), np.uint8) for text in TEXTS],
        "bytes": [np.frombuffer(b"\xff\xfe" * i, np.uint8) for i in range(n)],
        "boxes": [np.ones((i, 4), np.float32) for i in range(n)],
    }
    provenance = {"command": "made [bold]by[/] hand", "options": {"a": 1, "b": {}}}
    shards = [("train", batch), ("val", batch)]
    write_shards(tmp_path / "a set", shards, max_bytes=1500, provenance=provenance)
    return tmp_path / "a set"


def test_inspect(folder, data_prep):
    code, out, err = data_prep("inspect", folder)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    index = Index.load(folder)
    nbytes = size(sum(shard.bytes for shard in index.shards))
    told = f"10 samples, {len(index.shards)} shards, {nbytes}"
    assert lines[:3] == [str(folder), told, index.digest]
    assert "image uint8[3, 4, 4]" in lines
    assert "boxes float32[*, 4]" in lines
    assert "train pair 1.125 0.7181 0 2.25" in lines
    assert "train bad - - - - 100 infinite" in lines
    assert "val boxes 1 0 1 1 0 to 4" in lines
    assert "command made [bold]by[/] hand" in lines
    assert "options.a 1" in lines


def test_inspect_of_a_damaged_set(folder, data_prep):
    path = folder / Index.load(folder).shards[-1].path
    path.unlink()
    code, out, err = data_prep("inspect", folder)
    assert code == 3
    assert "splits" in out
    assert err == (
        f"data_prep: shard {path} is missing; index.json lists it. "
        "`python -m data_prep inspect --verify` lists every problem\n"
    )
