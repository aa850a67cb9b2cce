"""`python -m hpctrain doctor`: check the cluster from here, or its nodes by a job."""

import argparse
import json
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from tempfile import TemporaryDirectory

from omegaconf import OmegaConf

from hpctrain.base.errors import ConfigError, LaunchError, NodeError
from hpctrain.base.terminal.console import Cell, Console, Table
from hpctrain.cluster.ranks.hostlist import expand_hostlist
from hpctrain.cluster.slurm import queue
from hpctrain.cluster.slurm.excluded_hosts import folder_of
from hpctrain.config.composing.compose_sweep import composed
from hpctrain.config.frozen import from_omegaconf
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, DataConfig
from hpctrain.config.validate import validate_job
from hpctrain.insight.doctor import comparison, login
from hpctrain.insight.doctor.comparison import Places
from hpctrain.insight.doctor.finding import Finding, Result, bad, exclude, worst
from hpctrain.insight.doctor.measures import node_job
from hpctrain.insight.doctor.probe import Expectation, Probe
from hpctrain.launch.functions import function
from hpctrain.launch.functions.function_call import Call

# The cluster and the folders; the data set, too, if one is named.
_SECTIONS = (
    *("launch", "site", "network", "parallel", "tracking", "train", "monitor"),
    *("name", "output_dir"),
)
_TIME_MIN = 10  # of the job
_STYLES: dict[Result, str] = {"pass": "green", "unknown": "dim", "warn": "yellow", "fail": "red"}
# The columns of the table of nodes.
_FIGURES = {
    "matmul TFLOP/s": "matmul_tflops",
    "memory GB/s": "memory_gb_s",
    "to GPU GB/s": "to_gpu_gb_s",
    "in node GB/s": "all_reduce_in_node_bus_gb_s",
    "all-reduce GB/s": "all_reduce_bus_gb_s",
    "latency us": "all_reduce_latency_us",
}
_Figures = dict[str, dict[str, float]]


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
    twice = [text for text in options.overrides if text.lstrip("+").startswith("launch.nodes=")]
    if options.nodes is not None and twice:
        raise ConfigError(f"--nodes {options.nodes} and {twice[0]}: give one of them")
    count = [] if options.nodes is None else [f"launch.nodes={options.nodes}"]
    config, here = settings([*options.overrides, *count], options.config_dir)
    host, figures = socket.gethostname(), _Figures()
    if options.nodes is None:
        sections = config.data.path, config.tracking, config.monitor.idle_minutes
        places = {host: [*login.checked(JobRequest.of(config), *sections)]}
    else:
        launch = config.launch
        launch.time_min = min(launch.time_min, _TIME_MIN)
        if config.name == Config().name:
            config.name = "doctor"
        # Of the data only where it is: a transform may have a secret, and then a call is refused.
        data = {name: getattr(config.data, name) for name in ("path", "stage", "stage_dir")}
        asked = Expectation(
            *(launch, config.parallel, config.network, DataConfig(**data)),
            *(config.output_dir, JobRequest.of(config).mixed),
        )
        places, figures = _nodes(asked, lambda call: function.submit(config, [call], here)[0])
    result = worst(finding for found in places.values() for finding in found)
    if options.json:
        _print_json(result, places, figures)
    else:
        _show(places, figures)
    if options.nodes is not None:  # a full disk is among the findings, so they are shown first
        exclude(config.output_dir, places)
    return NodeError.exit_code if result == "fail" else 0


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


def _nodes(
    asked: Expectation, submit: Callable[[Call], function.FunctionJob | function.LocalFunctionJob]
) -> tuple[Places, _Figures]:
    """Check nodes by one short job; return the findings and the figures of each host.

    A refused job, or one that has ended without any answer, is a LaunchError.
    """
    folder, launch = folder_of(asked.output_dir), asked.launch
    folder.mkdir(parents=True, exist_ok=True)
    # The ranks leave the secret here by which they know each other.
    with TemporaryDirectory(dir=folder, prefix="ranks-", ignore_cleanup_errors=True) as meeting:
        call = Call.of(node_job.check, [asdict(asked), meeting], {})
        job = submit(call)
        # Standard output may be JSON.
        print(f"job {job.job_id} checks the nodes; its logs: {job.paths.folder}", file=sys.stderr)
        answers = job.answers()
    looks = [Probe.of_json(facts) for facts in answers.values()]
    if not looks:
        raise LaunchError(f"job {job.job_id}: no rank has answered; see {job.paths.folder}")
    places = comparison.compared(looks, mixed=asked.mixed)
    ranks = launch.node_numbers.start * launch.tasks_per_node
    if missing := sorted(set(range(ranks)) - answers.keys()):
        _add_missing(places, missing, launch.tasks_per_node, job.job_id)
    return places, comparison.figures(looks)


def _add_missing(places: Places, missing: Sequence[int], ranks: int, job_id: str) -> None:
    """Add a failure to the node of each rank that has not answered; a node has `ranks` of them."""
    ended = queue.ended([job_id.partition("_")[0]]) or {}
    listed = ended[job_id].nodes if job_id in ended else ""
    hosts = expand_hostlist(listed) if listed and listed[0] != "N" else []
    for rank in missing:
        number = rank // ranks
        host = hosts[number] if number < len(hosts) else f"node {number} of the job"
        finding = bad("answer", "fail", f"rank {rank} has not answered")
        places.setdefault(host, []).append(finding)


def _show(places: Places, figures: _Figures) -> None:
    """Print what was found, each cure once; with figures, only what is not well on each node."""
    shown = {
        host: [one for one in found if not figures or one.result in ("warn", "fail")]
        for host, found in places.items()
    }
    for host, findings in shown.items():
        if not findings:
            continue
        table = Table("check", "verdict", "found", title=f"{host}: {worst(places[host])}")
        for one in findings:
            found = one.found + f"; expected: {one.expected}" * bool(one.expected)
            table.add_row(one.check, Cell(one.result, _STYLES[one.result]), found)
        Console().print(table)
    cures = (one for findings in shown.values() for one in findings if one.cure)
    lines = [*dict.fromkeys(f"{one.result}: {one.check}: {one.cure}" for one in cures)]
    every = [one for findings in places.values() for one in findings if figures]
    if lacking := dict.fromkeys(one.check for one in every if one.result == "unknown"):
        lines.append(f"unknown (--json says why): {', '.join(lacking)}")
    for line in lines:
        Console().print(Cell(line), soft_wrap=True)
    if figures:
        _show_figures(places, figures)


def _show_figures(places: Places, figures: _Figures) -> None:
    table = Table("node", "verdict", *_FIGURES, title="nodes", right=range(2, 8))
    for host, findings in places.items():
        result, own = worst(findings), figures.get(host, {})
        cells = (f"{own[name]:,.4g}" if name in own else "" for name in _FIGURES.values())
        table.add_row(host, Cell(result, _STYLES[result]), *cells)
    Console().print(table)


def _print_json(result: Result, places: Places, figures: _Figures) -> None:
    """Print one JSON object: the result, the findings by place, and what was measured."""
    hosts = {
        place: {"verdict": worst(findings), "findings": [*map(_facts, findings)]}
        for place, findings in places.items()
    }
    print(json.dumps({"verdict": result, "places": hosts, "figures": figures}))


def _facts(finding: Finding) -> dict[str, str]:
    """Return what programs read of a finding, in which its result is the `verdict`."""
    return {"verdict" if key == "result" else key: text for key, text in asdict(finding).items()}
