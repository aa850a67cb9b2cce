"""Start a loop of one's own as users do, and compare what two runs have left."""

import sqlite3
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpctrain
from hpctrain.runs.checkpoints.manifest import checkpoints
from tests.conftest import Completed, hpctrain_on, journal_metrics, run_module

if TYPE_CHECKING:  # the workers of the cluster tests import no torch
    import torch

PROGRAMS = Path(__file__).parent / "programs"
Started = Callable[..., Completed]


def started(digits: Path, folder: Path) -> Started:
    """Return a function that starts a loop by its name, with runs in `folder`."""

    def call(loop: str, *overrides: str, ranks: int = 1, **options: Any) -> Completed:
        given = (f"loop={loop}", f"name={loop}", "--config-dir", str(PROGRAMS / "conf"))
        return hpctrain_on(ranks, *given, *common(digits, folder), *overrides, **at(options))

    return call


def script(ranks: int, module: str, *words: str, **options: Any) -> Completed:
    """Run a program of PROGRAMS as a module, on ranks of torchrun if there are several."""
    if ranks == 1:
        return run_module(module, *words, **at(options))
    several = ("--standalone", f"--nproc-per-node={ranks}", "-m", module)
    return run_module("torch.distributed.run", *several, *words, **at(options))


def at(options: dict[str, Any]) -> dict[str, Any]:
    """Return options for `run_module`, in the folder of the programs."""
    return {"cwd": PROGRAMS, **options}


def common(digits: Path, folder: Path) -> tuple[str, ...]:
    """Return the overrides that all of these runs have."""
    where = (f"data.path={digits}", f"output_dir={folder}")
    return (*where, "monitor.enabled=false", "tracking.upload=false", "parallel.timeout_s=60")


def tensors(run: Path) -> "dict[str, torch.Tensor]":
    """Return all tensors of the last checkpoint of a run, also the random states."""
    import torch
    import torch.distributed.checkpoint as dcp

    last = checkpoints(run / "checkpoints")[0]
    known = dcp.FileSystemReader(last).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in known.items()
        if isinstance(about, dcp.metadata.TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that this is one process
        dcp.load(state, checkpoint_id=last, no_dist=True)
    return state


def check_same_bits(one: Path, other: Path) -> None:
    """Check that two runs have ended with the same bits."""
    import torch

    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


def check_metrics(run: Path, store: Path, expected: Path) -> None:
    """Check that a run has each metric of another one once, in its journal and in its store.

    Times may differ.
    """
    points = sorted((*key, value) for key, value in journal_metrics(expected).items())
    table = hpctrain.load_run(run).metrics[["key", "step", "value"]]
    rows = table[~table["key"].str.startswith("perf/")].itertuples(index=False)
    assert sorted(map(tuple, rows)) == points
    asked = "SELECT key, step, value FROM metrics WHERE key LIKE 'train/%' OR key LIKE 'val/%'"
    with closing(sqlite3.connect(store)) as connection:
        assert sorted(connection.execute(asked).fetchall()) == points
