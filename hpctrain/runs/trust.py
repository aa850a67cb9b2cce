"""Ask before code of somebody else's run is executed, with the rights of whoever uses the run.

`_target_` in config.yaml names any function, and `code` in run.json a copy of code. Every command
reads the run of another user; what would execute its code goes on only with `--trust OWNER`, or
with HPCTRAIN_TRUST=OWNER,OWNER, which jobs and other processes inherit.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.base.errors import ConfigError
from hpctrain.cluster.slurm.job_environment import TRUST
from hpctrain.cluster.slurm.queue import user_name

log = logging.getLogger(__name__)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--trust OWNER` to a command that runs the code of a run."""
    text = "run the code of a run that belongs to this user, with your rights"
    parser.add_argument("--trust", type=accept, metavar="OWNER", help=text)


def accept(owner: str) -> None:
    """Trust a user in this process, and in the jobs and processes that it starts."""
    os.environ[TRUST] = ",".join(filter(None, (os.environ.get(TRUST), owner)))


def check(run: Path, executed: Sequence[str], code: Path | None = None) -> None:
    """Raise a ConfigError unless this user owns a run, or trusts its owner, which is said then.

    The run would execute what `config.frozen.executed` says, and import from the copy of code.
    """
    parts = [run, run / "config.yaml", run / "run.json"]
    parts += [] if code is None else [code, code / "pythonpath.json"]
    uids: set[int] = set()
    for part in parts:
        with suppress(OSError):
            uids |= {part.lstat().st_uid, part.stat().st_uid}
    names = {uid: user_name(uid) for uid in sorted(uids - {0, os.geteuid()})}
    if not names:
        return
    known = {word.strip() for word in os.environ.get(TRUST, "").split(",")}
    strangers = {uid: name for uid, name in names.items() if not {str(uid), name} & known}
    runs = [*executed, *([] if code is None else [f"the code in {code}"])]
    owners = " and ".join(f"{name} (uid {uid})" for uid, name in (strangers or names).items())
    text = f"{run} belongs to {owners}, and this runs with your rights: {'; '.join(runs)}"
    if strangers:
        word = ",".join(strangers.values())
        raise ConfigError(f"{text}. If you trust them: --trust {word} or {TRUST}={word}")
    log.warning("%s", text)
