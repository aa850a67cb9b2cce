"""Before the first step a run proves that it can save, and decides whether in the background."""

import logging
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.base.processes import cgroup
from hpctrain.base.units import GIB
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.checkpoint.saving import proof
from hpctrain.engine.checkpoint.saving.proof import prove
from hpctrain.engine.checkpoint.saving.saves import Saves
from hpctrain.errors import StorageError
from tests.ranks import run_ranks
from tests.steps import here, make

pytestmark = pytest.mark.usefixtures("group_of_one")


def saver(folder: Path) -> Checkpointer:
    step = make()
    return Checkpointer(folder, 2, here(), step.model, step.optimizer)


def test_a_folder_that_takes_no_checkpoint_is_refused_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = saver(tmp_path / "checkpoints")
    saved.prove()
    assert saved.saves.writer is None, "a small state is written at once"
    assert not [*saved.saves.folder.iterdir()]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"can be written \(its file .*1,000 \(ulimit -f\)"):
            saved.prove()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(
        StorageError, match="no checkpoint can be written: a checkpoint takes about"
    ):
        prove(saved.saves, here(), 1e18, 1e18)
    with caplog.at_level(logging.WARNING):
        prove(saved.saves, here(), 1e3, 1e18)
    assert "the disk is nearly full: a checkpoint takes about" in caplog.text
    (tmp_path / "a file").touch()
    with pytest.raises(StorageError, match=r"no checkpoint can be written \(File exists\)"):
        saver(tmp_path / "a file").prove()


def test_a_store_that_denies_a_rename_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function stands for such a store: there is none on this machine."""

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rename", denied)
    with pytest.raises(StorageError, match=r"can be written \(Operation not permitted\)"):
        saver(tmp_path / "checkpoints").prove()
    assert not [*(tmp_path / "checkpoints").iterdir()]


def test_writers_are_started_if_the_memory_has_room_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(proof, "SMALL_PART", 1000)
    monkeypatch.setattr(proof, "memory_left", lambda: 200 * GIB)
    limits = list[float]()
    monkeypatch.setattr(Saves, "start_writers", lambda self, limit: limits.append(limit))
    saver(tmp_path / "checkpoints").prove()
    four = replace(here(), world_size=4, local_world_size=4)
    prove(saver(tmp_path / "checkpoints").saves, four, 1e3, 24 * GIB)
    assert limits == [100 * GIB, 25 * GIB], "half of it, for all ranks of the node"
    with caplog.at_level(logging.WARNING):
        prove((saves := saver(tmp_path / "checkpoints").saves), four, 1e3, 26 * GIB)
    assert "saves stop the training: a copy takes about 26.0 GiB" in caplog.text
    assert len(limits) == 2
    assert saves.flags() == [], "no step pays for it"


def proved(folder: Path) -> str:
    saved = saver(folder / "checkpoints")
    if here().rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        saved.prove()
    except StorageError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return ""


def test_all_ranks_say_which_rank_cannot_write(tmp_path: Path) -> None:
    first, second = run_ranks(proved, 2, tmp_path)
    assert first == second
    assert "(rank 1: its file has more bytes than a file may have" in first


def test_what_a_node_has_left(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    (tmp_path / "cgroup").write_text("0::/job_1/step_0\n")
    group = tmp_path / "job_1" / "step_0"
    group.mkdir(parents=True)
    files = tmp_path / "cgroup", tmp_path, tmp_path / "meminfo"
    assert cgroup.memory_left(*files) == 5000 * 1024
    (group.parent / "memory.max").write_text("4000000\n")
    (group.parent / "memory.current").write_text("3000000\n")
    (group.parent / "memory.stat").write_text("inactive_file 500000\n")
    assert cgroup.memory_left(*files) == 1_500_000
