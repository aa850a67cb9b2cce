"""`python -m hpctrain doctor`: check the cluster from here, or its nodes by a job."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Sequence
from datetime import datetime

import msgspec
from omegaconf import OmegaConf

from hpctrain.config.composing.compose_call import composed
from hpctrain.config.frozen import from_omegaconf
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate_job
from hpctrain.console import Console, Table
from hpctrain.doctor import history, login, nodes, table
from hpctrain.doctor.finding import worst
from hpctrain.errors import ConfigError, NodeError

# The cluster and the folders; the data set, too, if one is named.
_SECTIONS = ("launch", "site", "network", "parallel", "tracking", "name", "output_dir")


def main(argv: list[str]) -> int:
    """Check and print; return the exit code: that of a NodeError if a check has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain doctor",
        description="Check versions, Slurm, storage and the MLflow store from this host; with "
        "--nodes, check nodes by a short job. Each check passes, warns or fails, with a cure. The "
        "exit code is 9 if one fails.",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="submit a job that checks N nodes: GPUs, limits, links, and measured speed",
    )
    parser.add_argument("--history", action="store_true", help="show earlier checks of each host")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with more configs")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="what is checked, such as experiment=digits site=mine launch.tasks_per_node=4",
    )
    options = parser.parse_args(argv)
    if options.nodes is not None and options.nodes < 1:
        raise ConfigError(f"--nodes {options.nodes}: it must be at least 1")
    if options.nodes is not None and options.history:
        raise ConfigError("--nodes and --history exclude each other: one checks, the other shows")
    twice = [text for text in options.overrides if text.lstrip("+").startswith("launch.nodes=")]
    if options.nodes is not None and twice:
        raise ConfigError(f"--nodes {options.nodes} and {twice[0]}: give one of them")
    count = [] if options.nodes is None else [f"launch.nodes={options.nodes}"]
    config, here = settings([*options.overrides, *count], options.config_dir)
    if options.history:
        return _show_history(config, as_json=options.json)
    host, figures = socket.gethostname(), dict[str, dict[str, float]]()
    if options.nodes is None:
        places = {host: list(login.checked(config))}
    else:
        places, figures = nodes.checked(config, here)
    verdict = worst(finding for found in places.values() for finding in found)
    if options.json:
        table.print_json(verdict, places, figures=figures)
    elif options.nodes is not None:
        table.print_nodes(places, figures)
    else:
        table.print_findings(f"{host}: {verdict}", places[host])
        table.print_cures(places[host])
    return NodeError.exit_code if verdict == "fail" else 0


def settings(overrides: Sequence[str], config_dir: str | None = None) -> tuple[Config, bool]:
    """Compose the overrides of one run, of which model and task may be missing.

    Returns:
        The config, whose `data.path` is "" if no data set is named, and whether jobs shall run on
        this machine (`hydra/launcher=submitit_local`).
    """
    for text in overrides:
        if not re.match(r"[+~]{0,2}[\w./@]+(=|$)", text):
            raise ConfigError(f"{text}: neither an option nor an override such as launch.nodes=2")
    with composed(overrides, config_dir) as call:
        if len(call.runs) != 1:
            raise ConfigError(f"{' '.join(overrides)}: {len(call.runs)} runs; give single values")
        node = call.composer(call.runs[0])
        has_data = not OmegaConf.is_missing(node.data, "path")
        sections = [*_SECTIONS, *(["data"] if has_data else [])]
        chosen = OmegaConf.masked_copy(node, sections)
        if not has_data:
            chosen["data"] = {"path": "."}
        config, here = from_omegaconf(chosen), call.local
    if not has_data:
        config.data.path = ""
    validate_job(config, sections)
    return config, here


def _show_history(config: Config, *, as_json: bool) -> int:
    entries = history.read(config.output_dir)
    if as_json:
        print(msgspec.json.encode(entries).decode())
        return 0
    if not entries:
        print(f"{config.output_dir}: no host was checked yet")
        return 0
    shown = Table("host", "time", "by", "verdict", "what")
    for entry in sorted(entries, key=lambda each: (each.host, each.time)):
        found = (f"{one.check}: {one.found}" for one in entry.findings)
        when = datetime.fromtimestamp(entry.time)
        cells = (entry.host, f"{when:%d %b %H:%M}", entry.by, entry.verdict)
        shown.add_row(*cells, "; ".join(found))
    Console().print(shown)
    return 0
