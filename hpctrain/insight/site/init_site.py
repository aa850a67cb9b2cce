"""`python -m hpctrain init-site`: write the site file of this cluster, or check one.

sinfo, scontrol, sacctmgr, sbatch --test-only, module, /sys/class/net ── conf/site/mine.yaml
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import ConfigError, LaunchError, StorageError
from hpctrain.base.terminal.terminal import exact
from hpctrain.cluster.slurm import node_kinds, release, sbatch
from hpctrain.insight.site import site_file, surroundings
from hpctrain.insight.site.choices import GIVEN, Choices, Questions, SiteFacts

_FILE = Path("conf/site/mine.yaml")


def main(argv: list[str]) -> int:
    """Write or check the file; return the exit code, which is 2 if a checked file does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain init-site",
        description="Write the site file of this cluster (site=mine) from what Slurm, `module` and "
        "this host say. Above each line stands where it is from. sbatch is asked what it takes by "
        "--test-only: nothing is queued. What cannot be read is asked at a terminal, and elsewhere "
        "left open.",
    )
    parser.add_argument(
        "given",
        nargs="*",
        metavar="KEY=VALUE",
        help=f"what you know already: {', '.join(GIVEN)} (the type of GPU)",
    )
    parser.add_argument(
        "--out", type=Path, default=_FILE, metavar="FILE", help=f"the file (default: {_FILE})"
    )
    parser.add_argument(
        "--check", action="store_true", help="tell what in the file no longer fits; write nothing"
    )
    asked = parser.parse_args(argv)
    if not sbatch.available():
        raise LaunchError("init-site: no sbatch on the PATH; run it on a login node of the cluster")
    seen = SiteFacts(node_kinds.kinds(), surroundings.associations(), Path.home(), os.environ)
    if asked.check:
        return _check(asked.out, seen)
    if asked.out.exists():
        raise ConfigError(f"{asked.out}: it exists; --check looks at it, --out names another")
    text = written(seen, Questions(_given(asked.given), _ask if _somebody_is_there() else None))
    try:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text)
    except OSError as error:
        raise StorageError(f"{asked.out}: cannot be written ({error.strerror})") from error
    print(text, end="", file=exact())
    print(
        f"\nwritten to {asked.out}: read each line. site={asked.out.stem} uses it, "
        "launch.dry_run=true shows a script",
        file=sys.stderr,
    )
    return 0


def written(seen: SiteFacts, questions: Questions) -> str:
    """Return the text of the file for a cluster."""
    choices = Choices(seen, questions)
    slurm = release.words() or "a Slurm that does not tell its version"
    head = [
        f"Written by `python -m hpctrain init-site` on {socket.gethostname()}, with {slurm}. Above "
        "each line stands where it is from. `init-site --check` tells what no longer fits.",
        choices.shape(),
    ]
    return site_file.text(head, choices.lines, choices.notes())


def _given(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in GIVEN or not equals or not value:
            raise ConfigError(f"init-site {word}: give KEY=VALUE, with one of {', '.join(GIVEN)}")
        found[key] = value
    return found


def _somebody_is_there() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty() and "SLURM_JOB_ID" not in os.environ


def _ask(key: str, options: Sequence[str]) -> str:
    """Ask at the terminal; an empty answer leaves it open."""
    while True:
        print(f"{key}? {', '.join(options)} (Enter: leave it open) ", end="", file=sys.stderr)
        sys.stderr.flush()
        said = sys.stdin.readline().strip()
        if not said or said in options:
            return said


def _check(path: Path, seen: SiteFacts) -> int:
    problems = [*site_file.misfits(site_file.read(path), seen)]
    for each in problems:
        print(f"{path}: {each}")
    if not problems:
        print(f"{path}: all that could be checked fits")
    return ConfigError.exit_code if problems else 0
