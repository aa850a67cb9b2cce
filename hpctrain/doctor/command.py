"""`python -m hpctrain doctor`: check the cluster from here, or its nodes by a job."""

from __future__ import annotations

import argparse
import socket

from hpctrain.doctor import login, table
from hpctrain.doctor.finding import worst
from hpctrain.doctor.settings import settings
from hpctrain.errors import NodeError


def main(argv: list[str]) -> int:
    """Check and print; return the exit code: that of a NodeError if a check has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain doctor",
        description="Check versions, Slurm, storage and the MLflow store from this host. Each "
        "check passes, warns or fails, with a cure. The exit code is 9 if one fails.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with more configs")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="what is checked, such as experiment=digits site=mine launch.nodes=4",
    )
    options = parser.parse_args(argv)
    config, _ = settings(options.overrides, options.config_dir)
    findings = list(login.checked(config))
    verdict, host = worst(findings), socket.gethostname()
    if options.json:
        table.print_json(verdict, {host: findings})
    else:
        table.print_findings(f"{host}: {verdict}", findings)
    return NodeError.exit_code if verdict == "fail" else 0
