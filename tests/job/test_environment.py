"""Every way to start a rank sets the variables of the config before torch is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import cluster
from tests.conftest import ROOT, Completed

# Python imports this module at its start. It writes the variables at the moment when torch is
# loaded. With ONLY_LOOK the rank then ends, which saves seconds; the other tests train to the end.
WATCH = """\
import json, os, sys
from importlib.machinery import PathFinder

NAMES = ("NCCL_", "GLOO_", "TORCH_DISTRIBUTED", "PYTORCH_", "MINE", "TRITON_")
NAMES += ("TORCHINDUCTOR_CACHE",)
RANKS = ("SUBMITIT_LOCAL_GLOBALID", "RANK", "SLURM_PROCID")


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (write(), load(module))
        return spec


def write():
    if "hpctrain" not in " ".join(sys.orig_argv) or "torch.distributed.run" in sys.orig_argv:
        return
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    seen = {k: v for k, v in os.environ.items() if k.startswith(NAMES)}
    with open(os.path.join(os.environ["SEEN"], rank), "w") as file:
        json.dump(seen, file)
    if "ONLY_LOOK" in os.environ:
        os._exit(0)


sys.meta_path.insert(0, Watch())
"""
SETTINGS = (
    "network.debug=WARN",
    *("+site.env.PYTORCH_ALLOC_CONF=expandable_segments:True", "+site.env.MINE=yes"),
)
EXPECTED = {"NCCL_DEBUG": "WARN", "PYTORCH_ALLOC_CONF": "expandable_segments:True", "MINE": "yes"}
SHORT = ("train.max_steps=2", "tracking=off", "launch.snapshot=off")


class Watched(NamedTuple):
    """The folder into which the ranks write what they have seen, and the variables for that."""

    seen: Path
    env: dict[str, str]

    def ranks(self) -> dict[str, dict[str, str]]:
        """Return the variables of the ranks, after a check of those of torch.compile."""
        found = {file.name: json.loads(file.read_text()) for file in self.seen.iterdir()}
        for seen in found.values():
            cache = Path(seen.pop("TORCHINDUCTOR_CACHE_DIR"))
            assert seen.pop("TRITON_CACHE_DIR") == f"{cache}/triton"
            assert cache.name == "compile"
            assert (cache.parent / "config.yaml").exists(), "the cache is in the run directory"
            assert cache.stat().st_mode & 0o777 == 0o700
        return found


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    for name in (*EXPECTED, "GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    folder, seen = tmp_path / "watch", tmp_path / "seen"
    folder.mkdir()
    seen.mkdir()
    (folder / "sitecustomize.py").write_text(WATCH)
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Watched(seen, {"SEEN": str(seen), "PYTHONPATH": ":".join(paths)})


def test_here_with_a_variable_of_ones_own(
    train: Callable[..., Completed], watched: Watched
) -> None:
    env = watched.env | {"NCCL_DEBUG": "VERSION", "ONLY_LOOK": "yes"}
    done = train(*SHORT, *SETTINGS, "network.interface=lo", new=True, **env)
    sockets = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
    assert watched.ranks() == {"0": EXPECTED | sockets | {"NCCL_DEBUG": "VERSION"}}
    kept = "exported variables are kept: NCCL_DEBUG=VERSION (not network.debug=WARN)\n"
    assert done.stderr.count(kept) == 1


@pytest.mark.slurm
@pytest.mark.usefixtures("empty_queue")
def test_jobs(
    train: Callable[..., Completed],
    digits: Path,
    tmp_path: Path,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = ("launch.nodes=2", "launch.tasks_per_node=1")
    monkeypatch.setenv("ONLY_LOOK", "1")
    train("-m", *SHORT, *SETTINGS, *ranks, new=True, **watched.env)
    jobs = cluster.job_ids(tmp_path / "runs")
    assert set(cluster.wait_for_end(jobs).values()) == {"COMPLETED"}
    assert watched.ranks() == {"0": EXPECTED, "1": EXPECTED}

    for file in watched.seen.iterdir():
        file.unlink()
    for name, value in watched.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HPCTRAIN_PYTHON", sys.executable)
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/others"]
    template = [str(ROOT / "slurm" / "train.sbatch"), *where, *SHORT, *SETTINGS]
    job = subprocess.run(
        ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", *template],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.strip()
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    assert watched.ranks() == {"0": EXPECTED, "1": EXPECTED}
