"""Tests how much memory rank 0 of 4,096 needs for 10^10 samples in 10^5 shards."""

import subprocess
import sys

import pytest

from hpctrain.shards.field import Field
from hpctrain.shards.index import Index, Shard

SHARDS, EACH = 100_000, 100_000
PROGRAM = """
import re, sys
from pathlib import Path
from itertools import islice
import numpy, torch
from hpctrain.data.loading.loader import Loader
from hpctrain.data.sources.reader import Reader
from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.samplers.order import Order

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

class Located:
    # The samples are found in the shards, but there are no files to read.

    def __init__(self, reader):
        self.reader, self.fields = reader, reader.fields

    def __len__(self):
        return len(self.reader)

    def read(self, indices, out):
        self.reader.locate(indices)
        return out

before = peak()
reader = Reader(Path(sys.argv[1]), "train")
assert len(reader) == 10**10
blocks = BlockOrder(len(reader), 0, 1024, 64)
for sampler in (Order(len(reader), 0), blocks):
    loader = Loader(
        Located(reader), global_batch_size=4096 * 32, dp_size=4096, sampler=sampler, threads=0
    )
    for consumed in (0, 7 * 10**10 + 131072 * 5):
        loader.load_state_dict({"consumed": consumed})
        assert len(list(islice(loader, 3 * 16_384 // 32))) == 1536
print(peak() - before)
"""


@pytest.mark.slow
def test_it_opens_in_little_memory(tmp_path):
    fields = {"image": Field("uint8", (3, 64, 64)), "label": Field("int64")}
    shards = tuple(
        Shard(f"train-{i:06d}.h5", "train", EACH, 1_229_000_000, f"xxh3_128:{i:032x}")
        for i in range(SHARDS)
    )
    Index(fields, shards).save(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 100  # MB
