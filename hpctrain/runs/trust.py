"""Ask before code of somebody else's run is executed, with the rights of whoever uses the run.

`_target_` in config.yaml names any function, and `code` in run.json a copy of code. Both belong to
whoever owns the files. A run of another user is read by every command; what would execute it goes
on only with `--trust OWNER`, or with HPCTRAIN_TRUST=OWNER,OWNER for the jobs that follow from it.
"""

from __future__ import annotations

import argparse
import logging
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.config.frozen import plain
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

VARIABLE = "HPCTRAIN_TRUST"
_MOST = 12  # names of functions in a sentence

log = logging.getLogger(__name__)


class _Trust(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        accept(values)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--trust OWNER` to a command that runs the code of a run."""
    parser.add_argument(
        "--trust",
        action=_Trust,
        metavar="OWNER",
        help="run the code of a run that belongs to this user, with your rights",
    )


def accept(owner: str) -> None:
    """Trust a user in this process, and in the jobs and processes that it starts."""
    os.environ[VARIABLE] = ",".join(filter(None, (os.environ.get(VARIABLE), owner)))


def check(run: Path, config: Config, code: Path | None = None) -> None:
    """Check that this user owns a run, or trusts its owner; who is trusted is said.

    Args:
        run: The run directory.
        config: What it would execute.
        code: The copy of code that it would import from.

    Raises:
        ConfigError: Somebody else owns it who was not named.
    """
    parts = [run, run / "config.yaml", run / "run.json"]
    parts += [] if code is None else [code, code / "pythonpath.json"]
    uids = {uid for part in parts for uid in _owners(part)} - {0, os.geteuid()}
    if not uids:
        return
    known = {word.strip() for word in os.environ.get(VARIABLE, "").split(",")}
    strangers = [uid for uid in sorted(uids) if not {str(uid), _name(uid)} & known]
    targets = list(dict.fromkeys(_targets(plain(config))))
    more = f" and {len(targets) - _MOST} more" if len(targets) > _MOST else ""
    runs = [f"_target_ {', '.join(targets[:_MOST])}{more}"] if targets else []
    if config.site.setup or config.site.teardown:
        runs.append("the lines of site.setup and site.teardown")
    runs += [] if code is None else [f"the code in {code}"]
    names = " and ".join(f"{_name(uid)} (uid {uid})" for uid in strangers or sorted(uids))
    text = f"{run} belongs to {names}, and this runs with your rights: {'; '.join(runs)}"
    if strangers:
        word = ",".join(map(_name, strangers))
        raise ConfigError(f"{text}. If you trust them: --trust {word} or {VARIABLE}={word}")
    log.warning("%s", text)


def _owners(path: Path) -> Iterator[int]:
    for follow in (False, True):
        try:
            yield os.stat(path, follow_symlinks=follow).st_uid
        except OSError:
            return


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # as in many containers
        return str(uid)


def _targets(node: Any) -> Iterator[str]:
    """Yield what is called, in the order of the config."""
    if isinstance(node, dict):
        if node.get("_target_"):
            yield str(node["_target_"])
        node = list(node.values())
    for each in node if isinstance(node, list | tuple) else ():
        yield from _targets(each)
