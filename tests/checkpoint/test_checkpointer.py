"""Checkpoints are loaded bit by bit, and a damaged or unfinished one is not loaded."""

import copy
import enum
import json
import logging
import os
import pickle
import random
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from hpctrain.base.names.step_names import step_of
from hpctrain.cluster.ranks import leaving
from hpctrain.data import generators
from hpctrain.data.generators import seed_generators
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.checkpoint.optimizer_state import OptimizerState
from hpctrain.engine.checkpoint.saved_state import FiniteValues
from hpctrain.engine.checkpoint.saving.part import RankPart
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.errors import ConfigError, DamageError, HealthError, MisfitError, StorageError
from hpctrain.models import MLP
from hpctrain.results.trained_model import load_weights
from hpctrain.runs.checkpoints import manifest
from hpctrain.runs.checkpoints.manifest import Manifest, checkpoints, damage, digest, put_back
from hpctrain.tasks import Classification
from tests.ranks import run_ranks
from tests.steps import alone, batch, here, make, stack_of_one_device, weights
from tests.steps import step_of as training_step

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("group_of_one")


def checkpointer(folder: Path, step: TrainStep, keep: int = 2) -> Checkpointer:
    return Checkpointer(folder, keep, here(), step.model, step.optimizer)


def trained(folder: Path) -> tuple[TrainStep, Checkpointer]:
    """Return a step that was made once, so that its optimizer has a state, and what saves it."""
    step = make()
    step(batch(8), 1e-2)
    return step, checkpointer(folder, step)


def test_saved_and_loaded_twice_goes_on_the_same(tmp_path: Path) -> None:
    """It is resumed twice, because a second resume was wrong in torch (pytorch #138575)."""
    step = make(dropout=0.5)
    saved = checkpointer(tmp_path, step)
    for number in range(1, 7):
        if number in (3, 5):
            saved.save(number, {"step": number})
            torch.manual_seed(number)  # the checkpoint must restore the random state
            step = make(dropout=0.5)
            saved = checkpointer(tmp_path, step)
            assert saved.load_latest() == {"step": number}
        step(batch(16, number), 1e-2)
    torch.manual_seed(0)
    undisturbed = make(dropout=0.5)
    for number in range(1, 7):
        undisturbed(batch(16, number), 1e-2)
    assert torch.equal(weights(step), weights(undisturbed))


def test_a_checkpoint_without_the_generators_of_numpy_and_python_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(generators, "states", lambda: {"cpu": torch.get_rng_state()})
        _, saved = trained(tmp_path)
        saved.save(1, {"step": 1})
        of_torch = torch.rand(1)
    seed_generators(5)
    *expected, of_seed = drawn_now()
    seed_generators(5)
    assert saved.load_latest() == {"step": 1}
    assert torch.equal(torch.rand(1), of_torch)
    assert drawn_now()[:4] == expected  # as the seed of the run has left them
    # If other ranks share samples than before, they may not have the states of single ranks.
    monkeypatch.setattr(ParallelModel, "layout", {"tp": 2})
    seed_generators(5)
    assert saved.load_latest() == {"step": 1}
    assert drawn_now()[-1] == of_seed


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    trained(tmp_path)[1].save(1, {"step": 1})
    other = make()
    other.model = alone(MLP(64, [8, 8], 10))
    other.optimizer = torch.optim.AdamW(other.model.parameters)
    with pytest.raises(MisfitError) as raised:
        checkpointer(tmp_path, other).load_latest()
    assert str(raised.value) == (
        f"{tmp_path}/step-00000001 does not fit the model: 1.weight is 16 x 64 there and 8 x 64 in "
        "the model; 1.bias is 16 there and 8 in the model; 3.weight is 10 x 16 there and 8 x 8 in "
        "the model; 3.bias is 10 there and 8 in the model; and 2 more"
    )
    with pytest.raises(StorageError, match=r"of another model: 1\.weight is 16 x 64 there and 8"):
        load_weights(MLP(64, [8], 10), tmp_path / "step-00000001")


def test_only_the_newest_stay_and_an_unfinished_one_is_none(tmp_path: Path) -> None:
    _, saved = trained(tmp_path)
    assert saved.load_latest() is None
    steps = (1, 99_999_999, 100_000_000)  # a step of nine digits has a longer name
    for number in steps:
        saved.save(number, {"step": number})
    for name in ("step-00000009.tmp", "step-000000009", "step-9", "step-x"):
        (tmp_path / name).mkdir()
    found = checkpoints(tmp_path)
    assert [path.name for path in found] == ["step-100000000", "step-99999999"]
    assert [step_of(path) for path in found] == [*steps[:0:-1]]
    assert saved.load_latest() == {"step": steps[-1]}


def test_the_newest_healthy_one_stays_and_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = make()
    saved = checkpointer(tmp_path, step)
    assert saved.save(1, {"step": 1})
    healthy = weights(step)
    with torch.no_grad():
        step.model.parameters[0][0, 0] = float("inf")
    assert not any(saved.save(number, {"step": number}) for number in (2, 3, 4))
    left = sorted(int(path.name[5:]) for path in checkpoints(tmp_path))
    assert left == [1, 3, 4], "the newest healthy one, beside the two that are kept"
    with caplog.at_level(logging.WARNING):
        assert saved.load_latest() == {"step": 1}
    assert "step-00000004 is not healthy (its parameters or buffers are not finite)" in caplog.text
    assert torch.equal(weights(step), healthy)
    assert all(saved.save(number, {"step": number}) for number in (5, 6))
    assert sorted(int(path.name[5:]) for path in checkpoints(tmp_path)) == [5, 6]
    for path in (5, 6):
        shutil.rmtree(tmp_path / f"step-{path:08d}")
    step.model.parameters[0].data[0, 0] = float("nan")
    saved.save(7, {"step": 7})
    with pytest.raises(StorageError, match="no checkpoint is intact and healthy"):
        saved.load_latest()


class Masked(nn.Module):
    """A model with buffers that may be infinite, and a batch norm, which may not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.register_buffer("lazy", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table * torch.inf
        self.lazy = torch.full((2,), -torch.inf)
        return self.layers(x)


def test_a_buffer_that_has_become_infinite_is_as_bad_as_a_parameter(tmp_path: Path) -> None:
    model = alone(Masked())
    optimizer = torch.optim.SGD(model.parameters)
    step = training_step(model, Classification(), optimizer, clip_norm=None)
    saved = checkpointer(tmp_path, step)
    step(batch(16), 1e-2)
    assert saved.save(1, {})
    assert saved.wrong == ""
    model.module.get_buffer("layers.1.running_var")[3] = torch.inf
    assert not saved.save(2, {})
    assert saved.wrong == "buffer layers.1.running_var"
    text = "buffer layers.1.running_var is not finite since step 2. Resuming the run starts from"
    step.health.begin(2, 32, list)
    step(batch(16), 0.0)  # the loss does not show it
    for policy in ("stop", "skip"):
        step.health.policy = policy
        step.health.judge(late=False)
        with pytest.raises(HealthError, match=text):
            step.health.judge_state(saved.wrong)
    assert manifest.newest_healthy(tmp_path) == saved.path(1)


def test_parameters_of_the_host_and_of_a_gpu_are_judged_together(monkeypatch: Patch) -> None:
    """Offload leaves undivided parameters on the GPU, for which a tensor without values stands."""
    monkeypatch.setattr(torch, "stack", stack_of_one_device)
    with FakeTensorMode():
        module = nn.ParameterDict({"divided": torch.ones(3)})
        module["undivided"] = nn.Parameter(torch.ones(3, device="cuda"))
        with pytest.raises(DataDependentOutputException):  # only the values are missing
            FiniteValues({"": module}).wrong()


@pytest.mark.parametrize("kind", ["bit", "truncated", "missing", "manifest", "progress"])
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    step, saved = trained(tmp_path)
    for number in (1, 4):
        saved.save(number, {"step": number})
    newest = tmp_path / "step-00000004"
    (data,) = newest.glob("*.distcp")
    content = bytearray(data.read_bytes())
    if kind == "bit":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif kind == "truncated":
        os.truncate(data, len(content) - 1)
    elif kind == "missing":
        data.unlink()
    elif kind == "manifest":
        (newest / "manifest.json").write_text("{")
    else:
        text = (newest / "manifest.json").read_text()
        assert text.count('"step": 4') == 2
        (newest / "manifest.json").write_text(text.replace('"step": 4', '"step": 3'))
    assert damage(newest)
    saved = checkpointer(tmp_path, step, keep=1)
    with caplog.at_level(logging.WARNING):
        assert saved.load_latest() == {"step": 1}
    assert "step-00000004 is not intact" in caplog.text
    # It does not count for those that are kept.
    for number in (2, 3):
        saved.save(number, {"step": number})
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["4", "3"]
    # The step can be saved again, in place of the damaged checkpoint.
    saved.save(4, {"step": 4})
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["4"]
    assert saved.load_latest() == {"step": 4}
    for path in tmp_path.glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(StorageError, match="no checkpoint is intact"):
        saved.load_latest()


def test_the_best_one_stays_beside_the_newest(tmp_path: Path) -> None:
    _, saved = trained(tmp_path)
    for number in range(1, 5):
        saved.save(number, {"step": number}, best=1)
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["4", "3", "1"]


def is_read(content: bytes) -> bool:
    try:
        Manifest.parse(content, Path("manifest.json"))
    except DamageError:
        return False
    return True


def test_every_flipped_bit_of_a_manifest_is_seen(tmp_path: Path) -> None:
    progress = {"step": 200, "data": {"consumed": 12800}, "metrics": {"é": 1e5, "x": 0.25}}
    files = {"__0_0.distcp": {"bytes": 51343, "xxh3_128": "0f" * 16}}
    Manifest(200, 4, progress, files, 1.5e9, {"dp_shard": 4}).write(tmp_path)
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    assert Manifest.read(tmp_path).progress == json.loads(content)["progress"] == progress
    damaged = [content[:length] for length in range(len(content))]
    for position in range(len(content)):
        flipped = [content[position] ^ 1 << bit for bit in range(8)]
        # Other white space is the same JSON, but not the same bytes.
        other = [] if content[position] not in b"\n " else {*b"\n\t "} - {content[position]}
        start, rest = content[:position], content[position + 1 :]
        damaged += [start + bytes([byte]) + rest for byte in (*flipped, *other)]
    assert len(damaged) > 3000
    assert [each for each in damaged if is_read(each)] == []
    path.write_bytes(damaged[-1])
    assert damage(tmp_path).startswith("manifest.json is damaged: ")


def test_a_manifest_of_a_later_release_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(manifest, "VERSION", 2)
        Manifest(1, 1, {}, {}, 1.5e9, {}).write(tmp_path)
    with pytest.raises(StorageError, match="found version 2, this hpctrain reads 1"):
        Manifest.read(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    del content["digest"]  # a manifest without a digest could have any damage
    assert not is_read(json.dumps(content | {"version": 1}).encode())


class Hostile:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def dressed(checkpoint: Path) -> None:
    """Let the manifest fit the files, as somebody who sends a checkpoint does."""
    found = Manifest.read(checkpoint)
    files = {
        name: {"bytes": (checkpoint / name).stat().st_size, "xxh3_128": digest(checkpoint / name)}
        for name in found.files
    }
    replace(found, files=files).write(checkpoint)
    assert not damage(checkpoint)


class Reaching:
    """Its pickle asks for an attribute of a class that DCP's metadata may have."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (StorageMeta, "__init__")


def bombs() -> dict[str, bytes]:
    """Return pickles that C code would hash for years, or whose depth would end the process.

    The first has 127 bytes: a tuple of tuples, 60 deep, is a key.
    """
    start, used_twice = b"\x80\x04", b"".join(b"\x94h%c\x86" % n for n in range(60))
    index, member = (pickle.dumps(c, 3)[2:-1] for c in (MetadataIndex, _MEM_FORMAT_ENCODING))
    within = 3 * (index + b")\x81}\x8c\x03fqn") + b"K\x01" + 3 * b"sb"
    return {
        "it has an opcode that is no part": start + b"}K\x01" + 60 * b"2\x86" + b"Ns.",
        "it uses a tuple twice": start + b"}K\x01" + used_twice + b"Ns.",
        "it has a tuple as a key": start + b"}K\x01K\x02\x86Ns.",
        "it has a MetadataIndex as a key": start + b"}" + within + b"Ns.",
        "it makes an object in another way": start + member + b")" + 10**5 * b"\x85" + b"R.",
    }


def hostile_metadata(folder: Path, checkpoint: Path) -> dict[str, bytes]:
    """Return pickles that must not be loaded, by what the error says."""
    good = pickle.loads((checkpoint / ".metadata").read_bytes())
    outside = copy.deepcopy(good)
    next(iter(outside.storage_data.values())).relative_path = "../other"
    changed = pickle.dumps(StorageMeta)[:-1] + pickle.dumps((None, {"modules": "x"}))[2:-1] + b"b."
    return {
        r"posix\.mkdir": pickle.dumps(Hostile(folder)),
        r"torch\.serialization\.load": pickle.dumps(torch.load),
        "it calls getattr": pickle.dumps(Reaching()),
        r"torch\.nn\.modules": pickle.dumps(torch.nn.Linear),
        "it changes a type": changed,
        **bombs(),
        "it holds a dict": pickle.dumps({}),
        "outside of the checkpoint": pickle.dumps(outside),
        "it ends too early": b"",
    }


def test_metadata_of_an_early_python_3_11_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pickles a member of an enumeration as a call of `getattr`; Debian 12 has 3.11.2."""
    by_name = enum.pickle_by_enum_name
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    _, saved = trained(tmp_path)
    saved.save(1, {"step": 1})
    assert b"getattr" in (tmp_path / "step-00000001" / ".metadata").read_bytes()
    assert saved.load_latest() == {"step": 1}


def test_loading_runs_no_code_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = tmp_path / "checkpoints", tmp_path / "made by the hostile pickle"
    step, saved = trained(folder)
    saved.save(1, {"step": 1})
    checkpoint = folder / "step-00000001"
    content = (checkpoint / ".metadata").read_bytes()
    for said, hostile in hostile_metadata(made, checkpoint).items():
        (checkpoint / ".metadata").write_bytes(hostile)
        dressed(checkpoint)
        for load in (saved.load_latest, lambda: load_weights(step.model.module, checkpoint)):
            with pytest.raises(StorageError, match=said) as raised:
                load()
            assert f"{checkpoint}/.metadata" in str(raised.value)
    (checkpoint / ".metadata").write_bytes(content)
    # Size and digest are looked at before it is read as a pickle.
    with pytest.raises(StorageError, match=r"\.metadata: not of the size in manifest\.json"):
        load_weights(step.model.module, checkpoint)
    dressed(checkpoint)
    assert saved.load_latest() == {"step": 1}
    step.optimizer.param_groups[0]["betas"] = [Hostile(made)]
    with pytest.raises(ConfigError, match=r"cannot hold the state .*betas is a list"):
        saved.save(2, {"step": 2})
    with monkeypatch.context() as stranger:  # another program writes what it likes
        stranger.setattr(OptimizerState, "_checked", lambda self, key, value: value)
        saved.save(2, {"step": 2})
    step = make()
    with pytest.raises(StorageError, match=r"posix\.mkdir") as raised:
        checkpointer(folder, step).load_latest()
    assert str(folder / "step-00000002" / "__0_0.distcp") in str(raised.value)
    load_weights(step.model.module, folder / "step-00000002")  # the weights are beside the object
    assert not made.exists()


def test_a_checkpoint_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    _, saved = trained(folder)
    folder.write_text("not a folder")
    with pytest.raises(StorageError, match="the checkpoint was not written"):
        saved.save(1, {})


@pytest.mark.parametrize("late", [(RankPart, "write"), (Manifest, "write")])
def test_a_rank_of_an_older_step_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: tuple[type, str]
) -> None:
    """The other step begins while the files are written. The end of the process is an exception."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(leaving, "_exit", end)
    epochs, folder = tmp_path / "epochs", tmp_path / "checkpoints"
    _, saver = trained(folder)
    saver.saves._ranks = replace(saver.ranks, job_id="7")
    epochs.write_text("7 0 0\n")
    saver.save(1, {})
    write = getattr(*late)

    def written_late(*known: Any) -> Any:
        epochs.write_text("7 0 0\n7 0 1\n")
        return write(*known)

    monkeypatch.setattr(*late, written_late)
    with pytest.raises(SystemExit):
        saver.save(2, {})
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "step-00000002.tmp"}


@pytest.mark.parametrize("at", [(Path, "rename"), (shutil, "rmtree")])
def test_a_kill_while_a_checkpoint_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[Any, str]
) -> None:
    """The last step may be saved twice, and be the only one. A kill is an exception here."""
    step, saved = trained(tmp_path)
    saved.save(1, {"step": 1})
    call, renames = getattr(*at), at[0] is Path

    def killed(path: Path, *given: Any, **flags: Any) -> Any:
        if not path.is_dir() or (renames and path.suffix != ".tmp"):
            return call(path, *given, **flags)
        if not renames:  # in the midst of the removal
            (path / "manifest.json").unlink()
        raise SystemExit

    monkeypatch.setattr(*at, killed)
    with pytest.raises(SystemExit):
        saved.save(1, {"step": 1, "again": True})
    monkeypatch.undo()
    put_back(tmp_path)
    known = {"step": 1} if renames else {"step": 1, "again": True}
    assert checkpointer(tmp_path, step).load_latest() == known
    assert not [*tmp_path.glob("*.old")]


def test_a_full_file_is_named_with_its_limit(tmp_path: Path) -> None:
    """PyTorch's own message is `[enforce fail at inline_container.cc:672] . unexpected pos`."""
    _, saved = trained(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError) as caught:
            saved.save(1, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = "__0_0.distcp has the most bytes that a file may have, 1,000 (ulimit -f)"
    failed = f"{tmp_path}/step-00000001.tmp: the checkpoint was not written"
    assert str(caught.value) == f"{failed} ({told})"


def drawn_now() -> list[float]:
    """Return numbers of each generator; a normal one leaves another behind for the next call."""
    of_python = [random.random(), random.gauss(0, 1)]
    return [*of_python, np.random.random(), np.random.randn(), torch.rand(1).item()]  # noqa: NPY002


def saved_and_loaded(folder: Path) -> tuple[bool, dict[str, int] | None, Any, Any]:
    """Save on all ranks of a group, change what was saved, and load it."""
    step = make(dropout=0.5)
    saved = checkpointer(folder, step)
    step(batch(8), 1e-2)
    before = weights(step)
    seed_generators(torch.distributed.get_rank())  # each rank has random numbers of its own
    drawn_now()
    saved.save(1, {"step": 1})
    drawn = drawn_now()
    step(batch(8), 1e-2)
    progress = saved.load_latest()
    return torch.equal(weights(step), before), progress, drawn, drawn_now()


def loaded(folder: Path) -> dict[str, int] | None:
    return checkpointer(folder, make(dropout=0.5)).load_latest()


def reads(folder: Path, fails: bool) -> tuple[list[str], list[str], Any]:
    """Load; return which tensors this rank has read, which files it has verified, and the weights.

    With `fails`, rank 1 cannot read, and the error of this rank is in the place of the weights.
    """
    tensors: list[str] = []
    files: list[str] = []
    read, verify = dcp.FileSystemReader.read_data, manifest.digest

    def reading(self: Any, plan: LoadPlan, planner: Any) -> Any:
        if fails and torch.distributed.get_rank() == 1:
            raise OSError("the storage is gone")
        tensors.extend(i.dest_index.fqn for i in plan.items if i.type == LoadItemType.TENSOR)
        return read(self, plan, planner)

    def verifying(path: Path) -> str:
        files.append(path.name)
        return verify(path)

    step = make(dropout=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemReader, "read_data", reading)
        patch.setattr(manifest, "digest", verifying)
        try:
            checkpointer(folder, step).load_latest()
        except StorageError as error:
            return tensors, files, str(error)
    return tensors, files, weights(step).tolist()


def test_two_ranks_save_one_checkpoint_and_each_has_its_random_state(tmp_path: Path) -> None:
    first, second = run_ranks(saved_and_loaded, 2, tmp_path)
    for same, progress, drawn, again in (first, second):
        assert (same, progress) == (True, {"step": 1})
        assert drawn == again
    assert not {*first[2]} & {*second[2]}
    assert run_ranks(loaded, 2, tmp_path) == [{"step": 1}] * 2
    # Each tensor is read, and each file is verified, by one rank.
    (read, verified, mine), (read_too, verified_too, its) = run_ranks(reads, 2, tmp_path, False)
    parts = [name.partition(".")[0] for name in read + read_too]
    assert (len({*read, *read_too}), {*parts}) == (len(parts), {"model", "optimizer", "random"})
    assert (verified, verified_too) == (["__0_0.distcp", ".metadata"], ["__1_0.distcp"])
    assert mine == its
    failed = "it cannot be loaded (OSError: the storage is gone)"
    assert all(failed in said for *_, said in run_ranks(reads, 2, tmp_path, True))
    # No rank loads the unfinished save of a killed job.
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.tmp")
    assert run_ranks(loaded, 2, tmp_path) == [None] * 2
