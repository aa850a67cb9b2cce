"""One cluster: its folder and subnet, the names of its hosts, and its processes."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import signal
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dev_cluster.command import Failure, wait_for

SETTING = "HPCTRAIN_DEV_CLUSTER"
DEFAULT = "/var/tmp/hpctrain-dev-cluster:10.77.0.0/24"


class Cluster:
    """The cluster of one state folder and one subnet, running or not.

    A process belongs to the cluster if and only if its network namespace does. This is true for
    daemons, job steps and shells. Pid files are not used, so an old one cannot name a process that
    does not belong to the cluster.
    """

    def __init__(self, setting: str) -> None:
        folder, _, subnet = setting.partition(":")
        expected = f"{SETTING}={setting}: expected FOLDER[:SUBNET]"
        # The kernel limits the paths of sockets to 107 characters; the longest in the folder is
        # /spool/node64/node64_99999.4294967291.
        plain = re.fullmatch(r"/[\w./-]{1,69}", folder)
        if plain and not subnet:
            subnet = self._kept(Path(folder)).get("subnet", "")
        try:
            self.net = ipaddress.IPv4Network(subnet or DEFAULT.partition(":")[2])
        except ValueError as error:
            raise Failure(f"{expected}: {error}", 2) from None
        if not plain or self.net.prefixlen > 24:
            raise Failure(f"{expected}: a plain absolute path, at most 70 long; /24 or more", 2)
        self.folder = Path(os.path.realpath(folder))  # the kernel names mounts by real paths
        self.conf = self.folder / "slurm.conf"
        self.link = f"hpc{zlib.crc32(bytes(self.folder)):08x}"  # the machine's end of the veth link
        os.environ["SLURM_CONF"] = str(self.conf)

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes; none if there is no cluster."""
        return [f"node{i + 1}" for i in range(self._kept(self.folder).get("nodes", 0))]

    @staticmethod
    def _kept(folder: Path) -> dict[str, Any]:
        """Return what `up` has written of the cluster of a folder; nothing if there is none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            kept: dict[str, Any] = json.loads((folder / "cluster.json").read_text())
            return kept
        return {}

    def node(self, name: str) -> str:
        """Return `name` if it is the name of a node, or raise Failure."""
        if name not in self.nodes:
            raise Failure(f"no such node: {name} (there is {', '.join(self.nodes) or 'none'})", 2)
        return name

    def address(self, host: str) -> str:
        """Return the address of `head`, `nodeN` or `host` (this machine)."""
        offset = {"head": 1, "host": self.net.num_addresses - 2}
        return str(self.net[offset[host] if host in offset else 10 + int(host[4:])])

    def namespaces(self) -> dict[int, str]:
        """Return the host of each network namespace, by inode."""
        return {ns.stat().st_ino: ns.name for ns in (self.folder / "net").glob("*")}

    def processes(self) -> Iterator[tuple[str, str, int]]:
        """Yield host, program and pid of every process of the cluster."""
        hosts = self.namespaces()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # the process may end meanwhile
                if entry.name.isdigit():
                    host = hosts.get((entry / "ns/net").stat().st_ino)
                    if host:
                        yield host, (entry / "comm").read_text().strip(), int(entry.name)

    def daemons(self) -> dict[tuple[str, str], int]:
        """Return the pid of each daemon of the cluster, by host and program; 0 if it has died."""
        expected = [("head", p) for p in ("munged", "mariadbd", "slurmdbd", "slurmctld")]
        expected += [(node, "slurmd") for node in self.nodes]
        pids = {(host, program): pid for host, program, pid in self.processes()}
        return {daemon: pids.get(daemon, 0) for daemon in expected}

    def kill(self, host: str = "", program: str = "") -> None:
        """Send SIGKILL to the processes of the cluster, of one host, or of one program there."""

        def gone() -> bool:
            # The namespace of each pid was checked just before the pid is used.
            found = [pid for h, p, pid in self.processes() if host in ("", h) if program in ("", p)]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        wait_for("processes end after kill -9", gone)

    def check_folder(self) -> None:
        """Raise Failure if this tool has not made the state folder, which `down` deletes."""
        with contextlib.suppress(FileNotFoundError):
            info = self.folder.lstat()
            ours = stat.S_ISDIR(info.st_mode) and info.st_uid == 0 and not info.st_mode & 0o022
            names = {path.name for path in self.folder.iterdir()} if ours else set()
            if not ours or (names and "cluster.json" not in names):
                raise Failure(
                    f"{self.folder} exists, but this tool has not made it; choose another folder "
                    f"in {SETTING}"
                )
