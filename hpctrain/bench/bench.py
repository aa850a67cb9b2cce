"""`python -m hpctrain bench`: how fast are the loader, the steps and the links of a training?

The ranks are those that were started, as for a training: in this process, by torchrun, or by srun.
Nothing is trained: no run directory is made, and no checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.config.advice import cures
from hpctrain.console import Cell, Console, Table
from hpctrain.errors import ConfigError
from hpctrain.estimates.bench_figures import Figures
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.secrets import referenced

if TYPE_CHECKING:
    from hpctrain.config.schema import Config

_ONLY = {"data": "data", "compute": "compute", "comm": "communication"}


def main(argv: list[str]) -> int:
    """Measure and print; return the exit code."""
    options, overrides = _parser().parse_known_args(argv)
    if strange := [text for text in overrides if text.startswith("-")]:
        raise ConfigError(f"{strange[0]}: no option of bench (--help lists them)")
    if options.steps < 5:
        raise ConfigError(f"--steps {options.steps}: at least 5 are needed")
    ranks = RankInfo.from_env()
    parts = _parts(options, ranks)
    config = _config(overrides, options, ranks)
    found = _measured(config, ranks, parts, options)
    if not ranks.is_main:
        return 0
    kinds = ("data", "communication")
    limit = found.limit({kind: cures(kind, config, ranks.world_size) for kind in kinds})
    if options.json:
        print(json.dumps(asdict(found) | {"limit": limit}))
    else:
        _print(found)
        if limit:
            Console().print(Cell(limit))
    sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain bench",
        usage="python -m hpctrain bench KEY=VALUE... [OPTIONS]",
        description="Measure the loader, the steps and the links of a training by themselves: "
        "samples per second, the time of a step, MFU, and what limits. Nothing is trained.",
    )
    only = parser.add_mutually_exclusive_group()
    for name, part in _ONLY.items():
        only.add_argument(
            f"--{name}-only", dest="only", action="store_const", const=part, help=f"only {part}"
        )
    parser.add_argument("--steps", type=int, default=50, help="steps that are measured (50)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with more configs")
    return parser


def _parts(options: argparse.Namespace, ranks: RankInfo) -> list[str]:
    if options.only == "communication" and ranks.world_size == 1:
        raise ConfigError(
            "--comm-only: one rank sends nothing; start several (torchrun --nproc-per-node 2, srun)"
        )
    if options.only:
        return [options.only]
    sent = ["communication"] if ranks.world_size > 1 else []
    return ["data", "compute", *sent, "whole"]


def _config(overrides: list[str], options: argparse.Namespace, ranks: RankInfo) -> Config:
    from hpctrain.config.composing.compose_call import composed
    from hpctrain.runs.freeze import check

    with composed(overrides, options.config_dir) as call:
        if len(call.runs) != 1:
            raise ConfigError(f"{' '.join(overrides)}: {len(call.runs)} runs; give single values")
        config = call.composer.typed(call.runs[0])
    config.tracking.enabled = False
    check(config, ranks.world_size)
    return config


def _measured(
    config: Config, ranks: RankInfo, parts: list[str], options: argparse.Namespace
) -> Figures:
    """Form the group of the ranks, and measure."""
    import torch

    from hpctrain.bench.parts import Bench
    from hpctrain.distributed.group import process_group
    from hpctrain.hardware import of_device
    from hpctrain.rendezvous.variables import export

    export(config.network, config.train, config.site.env, one_node=ranks.one_node)
    folder = _folder(config, ranks)
    if ranks.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "logs").mkdir(parents=True)
    try:
        with process_group(ranks, config.parallel, config.launch, folder) as device:
            on_gpu = device.type == "cuda"
            title = torch.cuda.get_device_name(device) if on_gpu else "CPU"
            config.train.batch_size_ramp = []  # the steps after the ramp are measured
            bench = Bench(
                config,
                ranks,
                device,
                folder,
                options.steps,
                of_device(title) if on_gpu else None,
            )
            found = bench.measured(parts)
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return Figures(_setup(config, ranks, title), found, str(torch.__version__))


def _folder(config: Config, ranks: RankInfo) -> Path:
    """Return the folder, whose name all ranks know without communication."""
    return Path(config.output_dir) / f"bench-{ranks.job_id or 'here'}-{ranks.master_port}"


def _setup(config: Config, ranks: RankInfo, device: str) -> dict[str, Any]:
    """Return what two benchmarks must have in common to be comparable."""
    parallel = asdict(config.parallel)
    degrees = {name: value for name, value in parallel.items() if isinstance(value, int)}
    return {
        "device": device,
        "ranks": ranks.world_size,
        "nodes": ranks.num_nodes,
        "model": json.loads(json.dumps(referenced(config.model), default=str)),
        "data": Path(config.data.path).name,
        "train.global_batch_size": config.train.global_batch_size,
        "train.micro_batch_size": config.train.micro_batch_size,
        "train.compile": config.train.compile,
        "precision.compute": config.precision.compute,
        "parallel": {name: degrees[name] for name in sorted(degrees) if name != "timeout_s"},
    }


def _print(found: Figures) -> None:
    heads = ["part", "samples/s", "step p50 ms", "p95 ms", "MB/s", "MFU %"]
    title = f"{found.setup['ranks']} x {found.setup['device']}"
    table = Table(*heads, title=title, right=range(1, len(heads)))
    for name, part in found.parts.items():
        cells = [name, f"{part.samples_per_s:,.0f}", f"{part.p50_ms:.2f}", f"{part.p95_ms:.2f}"]
        cells.append("" if part.mb_per_s is None else f"{part.mb_per_s:,.1f}")
        cells.append("" if part.mfu_percent is None else f"{part.mfu_percent:.1f}")
        table.add_row(*cells)
    Console().print(table)
