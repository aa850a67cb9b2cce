"""The daemons of a cluster: munge, the accounting database, and those of Slurm."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable

from dev_cluster import accounting
from dev_cluster.cluster import Cluster
from dev_cluster.command import Failure, run, wait_for
from dev_cluster.controller import head_is_up, hurt, node_states
from dev_cluster.network import inside


class Daemons:
    """Starts daemons of a cluster, and watches those that it has started."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start_head(self) -> None:
        """Start the daemons on `head` that do not run, each when the one before answers."""
        runs = self.cluster.daemons()
        munge = self.cluster.folder / "munge"
        files = " ".join(f"--{name}-file={munge}/{name}" for name in ("key", "pid", "seed"))
        if not runs["head", "munged"]:
            (munge / "socket").unlink(missing_ok=True)
            self.start(
                "head", f"munged -F --force --num-threads=10 --socket={munge}/socket {files}"
            )
        if not runs["head", "mariadbd"]:
            accounting.prepare(self.cluster)
            self.start("head", accounting.database(self.cluster))
        self.wait("munged answers", (munge / "socket").exists)
        self.wait("mariadbd answers", accounting.socket(self.cluster).exists)
        # slurmdbd looks for the socket of the database there.
        os.environ["MYSQL_UNIX_PORT"] = str(accounting.socket(self.cluster))
        if not runs["head", "slurmdbd"]:
            self.start("head", "slurmdbd -D")
        self.wait("slurmdbd answers", lambda: run("sacctmgr -i add cluster dev", check=False))
        if not runs["head", "slurmctld"]:
            self.start("head", "slurmctld -D")
        self.wait("slurmctld answers", node_states)

    def revive_head(self) -> list[str]:
        """Start the daemons on `head` that have died, with their state; return their names."""
        if head_is_up(self.cluster):
            return []
        dead = [
            name
            for (host, name), pid in self.cluster.daemons().items()
            if host == "head" and not pid
        ]
        if not dead:  # slurmctld runs, but it does not answer
            self.cluster.kill("head", "slurmctld")
            dead = ["slurmctld"]
        self.start_head()

        def known() -> bool:
            daemons = self.cluster.daemons()
            return not any(daemons[node, "slurmd"] for node in hurt(self.cluster))

        # slurmctld calls a node down until it has heard of it, and `heal` would end its jobs.
        with contextlib.suppress(Failure):
            wait_for("slurmctld knows the nodes", known, 30)
        return dead

    def start(self, host: str, command: str) -> None:
        """Start a daemon on a host; its log is log/PROGRAM-HOST."""
        name = f"{command.split()[0]}-{host}"
        with (self.cluster.folder / "log" / name).open("ab") as log:
            self.started[name] = subprocess.Popen(
                inside(self.cluster, host, command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.cluster.folder,
                start_new_session=True,  # Ctrl-C and the end of the terminal must not end it
            )

    def wait(self, what: str, ready: Callable[[], object]) -> None:
        """Wait for a daemon; if one ends or hangs, raise Failure with the end of its log."""

        def ended() -> str:
            return next((name for name, p in self.started.items() if p.poll() is not None), "")

        try:
            wait_for(what, lambda: ended() or ready())
            if ended():
                raise Failure(f"{ended()} ended")
        except Failure as error:
            name = ended() or list(self.started)[-1]
            log = (self.cluster.folder / "log" / name).read_text(errors="replace").splitlines()
            end = "\n".join(log[-12:])
            raise Failure(f"{error}. The end of the log of {name}:\n{end}") from None

    def kill(self) -> None:
        """End the daemons that this object has started."""
        for child in self.started.values():
            child.kill()
            child.wait()
