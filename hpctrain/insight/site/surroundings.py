"""What is told beside nodes: a user's accounts, modules, network interfaces, folders for runs."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from hpctrain.base.errors import DistributedError
from hpctrain.base.files.disk import text_of
from hpctrain.base.files.mounts import kind_of
from hpctrain.base.forks import run
from hpctrain.cluster.ranks.hostlist import expand_hostlist
from hpctrain.cluster.slurm.node_kinds import NodeKind
from hpctrain.cluster.slurm.partition_limit import value_of
from hpctrain.cluster.slurm.queue import ask, me, rows

NET = Path("/sys/class/net")
# The variables in which sites name the folders of a user.
_FOLDERS = ("SCRATCH", "PSCRATCH", "CSCRATCH", "WORK", "PROJECT", "SCRATCHDIR", "WORKDIR", "DATA")


@dataclass(frozen=True)
class Association:
    """What a user may have in an account."""

    account: str
    partition: str  # "" for all
    qos: tuple[str, ...]
    default_qos: str


def associations() -> list[Association] | None:
    """Return what this user may have; None if there is no accounting, or it does not answer."""
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={me()}")
    answer = ask(*command, "format=account,partition,qos,defaultqos", quiet=True)
    if answer is None:
        return None
    return [
        Association(account, partition, tuple(filter(None, qos.split(","))), default)
        for account, partition, qos, default in rows(answer, [r"[^|]*"] * 4)
        if account
    ]


def usable_cpus(kind: NodeKind) -> int:
    """Return the CPUs of a node that jobs get: some sites keep a few for the system."""
    try:
        (first, *_) = expand_hostlist(kind.hosts)
    except (DistributedError, ValueError):
        return kind.cpus
    said = ask("scontrol", "--oneliner", "show", "node", first, quiet=True) or ""
    effective = value_of(said, "CPUEfctv")
    return int(effective) if effective.isdecimal() else kind.cpus


def chosen_modules(env: Mapping[str, str] = os.environ) -> tuple[list[str], str]:
    """Return `site.modules` for what is loaded in this shell, and why."""
    loaded = [each for each in env.get("LOADEDMODULES", "").split(":") if each]
    system = re.split("[:;,]", env.get("LMOD_SYSTEM_DEFAULT_MODULES", ""))
    if any(system):
        own = [each for each in loaded if each not in system and each.split("/")[0] not in system]
        why = "LMOD_SYSTEM_DEFAULT_MODULES is set: `reset` gives each job the same ones"
        return ["reset", *own], f"{why}, and then those that this shell has beside them"
    if loaded:
        start = [] if "LMOD_CMD" in env else ["purge"]
        return [*start, *loaded], "LOADEDMODULES: those of this shell; delete what you do not need"
    return [], "LOADEDMODULES: this shell has loaded none, and torch's wheels bring their CUDA"


def available_modules() -> list[str] | None:
    """Return the names of the modules here; None if there is no command `module`."""
    script = "type module >/dev/null 2>&1 && module -t avail 2>&1"
    try:
        done = run(["bash", "-lc", script], encoding="utf-8", errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    words = (line.strip() for line in done.stdout.splitlines())
    return [each for each in words if re.fullmatch(r"[\w.+/@-]+", each) and each[0] != "/"]


def interfaces(net: Path = NET) -> list[str]:
    """Return the network interfaces of this host that are up."""
    names = sorted(path.name for path in net.iterdir()) if net.is_dir() else []
    return [each for each in names if text_of(net / each / "operstate").strip() != "down"]


def folders(home: Path, env: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a sentence for each folder in which runs could be, the best ones first."""
    named = {name: Path(env[name]) for name in _FOLDERS if env.get(name, "").startswith("/")}
    for name, path in {**named, "HOME": home}.items():
        if path.is_dir():
            facts = os.statvfs(path)
            free = decimal(facts.f_bavail * facts.f_frsize)
            quota = "; a quota may be less" if kind_of(path) == "network" else ""
            yield f"${name}: {path}, {kind_of(path)}, {free} free{quota}"
