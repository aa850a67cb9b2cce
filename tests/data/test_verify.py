"""Tests that verification finds and names shards that differ from the index in any way."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.addons.node.stage import Stage
from hpctrain.data.places.origin import check_digest
from hpctrain.data.shards.index import Index
from hpctrain.data.sources import opened
from hpctrain.data.sources.reader import Reader
from hpctrain.errors import DataError
from tests.written import write_shards


@pytest.fixture
def source(tmp_path):
    write_shards(tmp_path / "set", [("train", {"x": np.arange(8000)})], max_bytes=16000)
    return tmp_path / "set"


@pytest.fixture
def shards(source):
    found = Index.load(source).shards
    assert len(found) == 4
    return found


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def edit(path, position=5000):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_unchanged_shards_pass(source):
    assert Reader(source, "train", first_use=True).read(np.arange(8000))["x"][-1] == 7999


def test_what_is_wrong_with_a_shard_is_said(source, shards):
    swap(source / shards[0].path, source / shards[1].path)
    os.truncate(source / shards[3].path, 100)
    with pytest.raises(DataError, match=rf"{shards[1].path} is changed: its digest is xxh3_128:"):
        first_use(source, 1)
    with pytest.raises(DataError, match=r"is truncated: it has 100 bytes"):
        first_use(source, 3)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_one_bit_anywhere_is_found(source, shards, data):
    shard = data.draw(st.sampled_from(shards))
    position = data.draw(st.integers(0, shard.bytes - 1))
    edit(source / shard.path, position)
    try:
        with pytest.raises(DataError, match=f"{shard.path} is changed"):
            first_use(source, shards.index(shard))
    finally:
        edit(source / shard.path, position)


def first_use(source, number, **options):
    """Read a sample of a shard, which has not been opened before."""
    return Reader(source, "train", first_use=True, **options).read(np.array([2000 * number]))


def test_first_use_reads_a_shard_once(source, shards, monkeypatch):
    checked = []

    def check(path, shard):
        checked.append(path)
        check_digest(path, shard)

    monkeypatch.setattr(opened, "check_digest", check)
    reader = Reader(source, "train", first_use=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(reader.read, [np.arange(6000)] * 10))
    assert sorted(checked) == [source / shard.path for shard in shards[:3]]
    edit(source / shards[3].path)
    for _ in range(2):  # the second call fails too
        with pytest.raises(DataError, match=f"{shards[3].path} is changed"):
            reader.read(np.array([7999]))


def test_first_use_of_a_staged_copy_that_was_edited(source, shards, tmp_path):
    stage = Stage(source, tmp_path)
    path = stage.path(shards[0])
    edit(path)
    with pytest.raises(DataError) as error:
        first_use(source, 0, place=stage)
    assert str(error.value).startswith(f"{shards[0].path}: shard {path} is changed")
    stage.close()
