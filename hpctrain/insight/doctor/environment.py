"""Show this process's place in a job: `python -m hpctrain doctor --env`."""

import argparse
import json
import os
import shutil
import socket
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hpctrain.base.secrets import MASK, is_secret, mask
from hpctrain.base.terminal.console import Console, Table
from hpctrain.cluster.ranks.ranks import RankInfo

_SHOWN = (
    *("SLURM_", "CUDA_VISIBLE_DEVICES", "ROCR_", "HIP_", "MASTER_", "OMP_NUM_THREADS"),
    *("NCCL_", "RCCL_", "GLOO_"),
)


def main(argv: list[str]) -> int:
    """Print the facts as a table or as JSON. Does not import torch."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain doctor --env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(argv)
    facts = collect()
    if options.json:
        print(json.dumps(facts))
        return 0
    table, environment = Table("", ""), facts.pop("environment")
    for name, value in {**facts.pop("ranks"), **facts, **environment}.items():
        table.add_row(name, ", ".join(value) if isinstance(value, list | tuple) else str(value))
    Console().print(table)
    return 0


def collect() -> dict[str, Any]:
    """Return ranks, host, versions and the environment variables that matter for a job."""
    ranks = RankInfo.from_env()
    return {
        "ranks": asdict(ranks),
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "idle_tasks": ranks.idle_tasks(),
        "sbatch": shutil.which("sbatch") or "not on the PATH",
        "python": sys.executable,
        "torch": installed_version("torch"),
        "environment": {
            name: MASK if is_secret(name) else mask(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(_SHOWN)
        },
    }


def installed_version(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
