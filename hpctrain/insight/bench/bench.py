"""`python -m hpctrain bench`: how fast are the loader and the steps of a training?

The ranks are those that were started, as for a training: in this process, by torchrun, or by srun.
Nothing is trained: no run directory is made, and no checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.console import Cell, Console, Table
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.insight.estimates.advice import cures

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.insight.bench.parts import PartFigures

_CLOSE = 1.1  # a loader that is only so much faster than the steps holds them up now and then


def main(argv: list[str]) -> int:
    """Measure and print; return the exit code."""
    options, overrides = _parser().parse_known_args(argv)
    if strange := [text for text in overrides if text.startswith("-")]:
        raise ConfigError(f"{strange[0]}: no option of bench (--help lists them)")
    if options.steps < 5:
        raise ConfigError(f"--steps {options.steps}: at least 5 are needed")
    ranks = RankInfo.from_env()
    config = _config(overrides, options, ranks)
    parts = [options.only] if options.only else ["data", "compute", "whole"]
    found, setup = _measured(config, ranks, parts, options.steps)
    if not ranks.is_main:
        return 0
    limit = _limit(found, cures("data", config, ranks.world_size))
    if options.json:
        figures = {name: asdict(part) for name, part in found.items()}
        print(json.dumps({"setup": setup, "parts": figures, "limit": limit}))
    else:
        _print(found, f"{setup['ranks']} x {setup['device']}")
        if limit:
            Console().print(Cell(limit))
    sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain bench",
        usage="python -m hpctrain bench KEY=VALUE... [OPTIONS]",
        description="Measure the loader and the steps of a training by themselves: samples per "
        "second, the time of a step, MFU, and what limits. Nothing is trained.",
    )
    only = parser.add_mutually_exclusive_group()
    for part in ("data", "compute"):
        only.add_argument(
            f"--{part}-only", dest="only", action="store_const", const=part, help=f"only {part}"
        )
    parser.add_argument("--steps", type=int, default=50, help="steps that are measured (50)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with more configs")
    return parser


def _config(overrides: list[str], options: argparse.Namespace, ranks: RankInfo) -> Config:
    from hpctrain.config.composing.compose_sweep import composed
    from hpctrain.config.rules.own_loop import check_ours
    from hpctrain.runs.freeze import check

    with composed(overrides, options.config_dir) as call:
        if len(call.runs) != 1:
            raise ConfigError(f"{' '.join(overrides)}: {len(call.runs)} runs; give single values")
        config = call.composer.typed(call.runs[0])
    check_ours(config, "bench")
    config.tracking.enabled = False
    check(config, ranks.world_size)
    return config


def _measured(
    config: Config, ranks: RankInfo, parts: list[str], steps: int
) -> tuple[dict[str, PartFigures], dict[str, Any]]:
    """Form the group of the ranks, and measure; return the figures, and of what they are."""
    import torch

    from hpctrain.cluster.ranks.variables import export
    from hpctrain.config.sections import LoopSections
    from hpctrain.engine.distributed.group import process_group
    from hpctrain.insight.bench.parts import Bench
    from hpctrain.insight.estimates.hardware import of_device

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
            hardware = of_device(title) if on_gpu else None
            bench = Bench(LoopSections.of(config), ranks, device, folder, steps, hardware)
            found = bench.measured(parts)
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    setup = {"device": title, "ranks": ranks.world_size, "nodes": ranks.num_nodes}
    return found, setup | {"torch": str(torch.__version__)}


def _folder(config: Config, ranks: RankInfo) -> Path:
    """Return the folder, whose name all ranks know without communication."""
    return Path(config.output_dir) / f"bench-{ranks.job_id or 'here'}-{ranks.master_port}"


def _limit(parts: Mapping[str, PartFigures], cure: str) -> str:
    """Return what limits the training, with its cure; "" if too little was measured."""
    data, compute = parts.get("data"), parts.get("compute")
    if compute is None:
        return ""
    if data is None or data.samples_per_s >= _CLOSE * compute.samples_per_s:
        return "Computing limits."
    ratio = data.samples_per_s / compute.samples_per_s
    text = f"The loader limits: it brings {ratio:.2f} times what the steps take"
    return ": ".join(filter(None, (text, cure))) + "."


def _print(found: Mapping[str, PartFigures], title: str) -> None:
    heads = ["part", "samples/s", "step p50 ms", "p95 ms", "MB/s", "MFU %"]
    table = Table(*heads, title=title, right=range(1, len(heads)))
    for name, part in found.items():
        cells = [name, f"{part.samples_per_s:,.0f}", f"{part.p50_ms:.2f}", f"{part.p95_ms:.2f}"]
        cells.append("" if part.mb_per_s is None else f"{part.mb_per_s:,.1f}")
        cells.append("" if part.mfu_percent is None else f"{part.mfu_percent:.1f}")
        table.add_row(*cells)
    Console().print(table)
