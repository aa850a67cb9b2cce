"""Tests where shards are read: the choice of the folder, the kinds of file systems, URLs."""

import logging
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest

from hpctrain.addons.node.node_folder import job_memory
from hpctrain.addons.node.stage import Stage
from hpctrain.base.files.mounts import kind_of
from hpctrain.base.processes import cgroup
from hpctrain.data.places.placement import Folder, load_index, open_place
from hpctrain.data.shards.index import Index
from hpctrain.errors import ConfigError, DataError, StorageError
from tests.written import write_shards


@pytest.fixture
def source(tmp_path):
    write_shards(tmp_path / "set", [("train", {"x": np.arange(6000)})], max_bytes=16000)
    return tmp_path / "set"


@pytest.fixture
def shards(source):
    return Index.load(source).shards


@pytest.fixture
def memory(source):
    """Copy the data set into the memory file system of fsspec, and return its URL."""
    system = fsspec.filesystem("memory")
    system.put(str(source), "/bucket/set", recursive=True)
    yield "memory://bucket/set"
    system.rm("/bucket", recursive=True)


def test_in_place(source, shards):
    for mode in ("none", "auto"):  # the folder of the tests is on a local disk
        place = open_place(source, mode, shards)
        assert isinstance(place, Folder)
        place.plan(shards)
        assert place.path(shards[1]) == source / shards[1].path
        place.close()


def test_node_takes_the_jobs_own_folder_first(source, shards, tmp_path):
    for name in ("slurm", "tmp", "mine"):
        (tmp_path / name).mkdir()
    environ = {"SLURM_TMPDIR": f"{tmp_path}/slurm", "TMPDIR": f"{tmp_path}/tmp"}
    for expected, folder in [("slurm", None), ("mine", tmp_path / "mine")]:
        with closing(open_place(source, "node", shards, folder=folder, environ=environ)) as place:
            assert place.path(shards[0]).parent.parent == tmp_path / expected
    environ["SLURM_TMPDIR"] = f"{tmp_path}/nowhere"
    with closing(open_place(source, "node", shards, environ=environ)) as place:
        assert place.path(shards[0]).parent.parent == tmp_path / "tmp"


def test_a_folder_that_does_not_exist_is_made(source, shards, tmp_path):
    folder = tmp_path / "scratch" / "mine"
    with closing(open_place(source, "node", shards, folder=folder)) as place:
        assert place.path(shards[0]).parent.parent == folder


def test_node_without_a_usable_folder_says_why(source, shards, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as error:
        open_place(source, "node", shards, folder=tmp_path / "file" / "below")
    assert str(error.value) == (
        f"no folder of this node can hold staged shards: {tmp_path}/file/below cannot be made: Not "
        "a directory. data.stage_dir names another"
    )
    with pytest.raises(StorageError, match=f"{tmp_path}/file cannot be made: File exists"):
        open_place(source, "node", shards, folder=tmp_path / "file")
    monkeypatch.setattr("hpctrain.addons.node.node_folder.free_bytes", lambda folder: 20)
    with pytest.raises(StorageError, match=r"has room for 0.0 MiB of staged shards, and the larg"):
        open_place(source, "node", shards, folder=tmp_path)


def test_auto_falls_back_to_the_network(source, shards, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hpctrain.data.places.placement.kind_of", lambda folder: "network")
    with closing(open_place(source, "auto", shards, folder=tmp_path)) as place:
        assert isinstance(place, Stage)
    assert not caplog.records
    (tmp_path / "file").touch()
    place = open_place(source, "auto", shards, folder=tmp_path / "file")
    assert isinstance(place, Folder)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.endswith(f"Shards are read from {source}")


# URLs


@pytest.mark.parametrize("mode", ["node", "auto"])
def test_a_data_set_in_a_store(memory, source, tmp_path, mode):
    index = load_index(memory)
    assert index == Index.load(source) == load_index(source)
    with closing(open_place(memory, mode, index.shards, folder=tmp_path)) as place:
        place.plan(index.shards)
        for shard in index.shards:
            assert place.path(shard).read_bytes() == (source / shard.path).read_bytes()


def test_fsspecs_file_system_of_files(source, shards, tmp_path):
    assert load_index(f"file://{source}/") == Index.load(source)
    with closing(open_place(f"file://{source}/", "auto", shards, folder=tmp_path)) as place:
        assert place.path(shards[0]).read_bytes() == (source / shards[0].path).read_bytes()


def test_a_url_cannot_be_read_in_place(memory, shards, tmp_path):
    with pytest.raises(ConfigError, match=r"memory://bucket/set cannot be read in place; use data"):
        open_place(memory, "none", shards)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="no folder of this node"):
        open_place(memory, "auto", shards, folder=tmp_path / "file")


def test_a_url_needs_room_for_all_shards(memory, source, shards, tmp_path, monkeypatch):
    most = 2 * sum(shard.bytes for shard in shards)  # half of what is free may be used
    monkeypatch.setattr("hpctrain.addons.node.node_folder.free_bytes", lambda folder: most - 2)
    with pytest.raises(StorageError, match="of staged shards, and they have"):
        open_place(memory, "auto", shards, folder=tmp_path)
    open_place(source, "node", shards, folder=tmp_path).close()
    monkeypatch.setattr("hpctrain.addons.node.node_folder.free_bytes", lambda folder: most)
    open_place(memory, "auto", shards, folder=tmp_path).close()


@pytest.mark.usefixtures("memory")
def test_no_data_set_at_a_url():
    with pytest.raises(DataError, match=r"memory://bucket has no index.json: it is not a finished"):
        load_index("memory://bucket")
    fsspec.filesystem("memory").pipe("/bucket/cut/index.json", b"{")
    with pytest.raises(DataError, match=r"memory://bucket/cut/index.json is damaged: it is not"):
        load_index("memory://bucket/cut")


def test_an_unknown_protocol():
    with pytest.raises(DataError, match=r"swift9://x cannot be read: Protocol not known: swift9"):
        load_index("swift9://x")


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("s3fs", "s3://bucket/set cannot be read: Install s3fs"),
        ("fsspec", "needs the package fsspec"),
    ],
)
def test_a_package_that_is_missing(package, words):
    # In another process, where it cannot be imported even if it is installed.
    code = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from hpctrain.data.places.placement import load_index\n"
        "load_index('s3://bucket/set')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert words in done.stderr.splitlines()[-1]


# File systems

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /dev/shm rw,nosuid - tmpfs tmpfs rw
40 22 0:40 / /lustre rw - lustre 10.0.0.1@o2ib:/fs rw
41 40 0:41 / /lustre/local rw shared:9 - xfs /dev/nvme0n1 rw
42 22 0:42 / /home/with\\040space rw - nfs4 server:/home rw
43 22 0:43 / /scratch rw - ext4 /dev/sdb rw
44 22 0:44 / /scratch rw - beegfs beegfs_nodev rw
45 22 0:45 / /s rw - fuse.sshfs host:/ rw
46 22 0:46 / /c rw - fuse.squashfuse_ll image rw
47 22 0:47 / /d rw - fuseblk /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x", "disk"),
        ("/dev/shm/a/b", "memory"),
        ("/dev/shmoo", "disk"),
        ("/lustre/project", "network"),
        ("/lustre/local/x", "disk"),
        ("/home/with space/x", "network"),
        ("/scratch", "network"),
        ("/s/x", "network"),
        ("/c", "disk"),
        ("/d", "disk"),
    ],
)
def test_the_kind_of_a_file_system(tmp_path, path, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert kind_of(Path(path), mounts) == kind


def test_a_network_folder_cannot_hold_the_copies(source, shards, tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.addons.node.node_folder.kind_of", lambda folder: "network")
    with pytest.raises(StorageError, match="is on a network file system, not of this node"):
        Stage(source, tmp_path)


def test_the_memory_of_the_job(tmp_path, monkeypatch):
    everything = job_memory({})
    assert everything > 2**20
    assert job_memory({"SLURM_MEM_PER_NODE": "3"}) == 3 * 2**20
    assert job_memory({"SLURM_MEM_PER_NODE": "0"}) == everything
    assert job_memory({"SLURM_MEM_PER_CPU": "2", "SLURM_CPUS_ON_NODE": "2"}) == 4 * 2**20
    groups = tmp_path / "groups"
    for line, job, file in [
        ("0::/slurm/job_1/step_0", "slurm/job_1", "memory.max"),
        ("4:cpu,memory:/slurm/job_2/step_0", "memory/slurm/job_2", "memory.limit_in_bytes"),
    ]:
        (groups / job / "step_0").mkdir(parents=True)
        (groups / job / "step_0" / file).write_text("max\n")
        (groups / job / file).write_text(f"{2**30}\n")
        (tmp_path / "cgroup").write_text(f"3:cpuset:/other\n{line}\n")
        found = partial(cgroup.folders, membership=tmp_path / "cgroup", root=groups)
        monkeypatch.setattr("hpctrain.addons.node.node_folder.cgroup.folders", found)
        assert job_memory({}) == 2**30
