"""The hosts of a cluster: each is a network namespace, linked to the bridge in `head`."""

from __future__ import annotations

import shlex
from pathlib import Path

from dev_cluster.cluster import Cluster
from dev_cluster.command import run, wait_for

# This script runs in a new UTS and mount namespace. Its arguments are the host name, the state
# folder and a command. slurmd does not start without a file system on /sys/fs/cgroup, and it would
# change the cgroups of systemd there; with an empty file system it works everywhere.
ENTER = """\
hostname "$1" &&
mount --bind "$2/hosts" /etc/hosts &&
mount --bind "$2/nodes/$1" "$2/scratch" &&
mount -t tmpfs none /sys/fs/cgroup || exit 1
shift 2
exec "$@"
"""


def make(cluster: Cluster) -> None:
    """Create the network namespaces and link them to the bridge, which is in `head`."""
    ns = {host: str(cluster.folder / "net" / host) for host in ("head", *cluster.nodes)}
    width = cluster.net.prefixlen
    for path in ns.values():
        run(f"unshare --net={path} true")
    run(f"ip link add {cluster.link} type veth peer name host netns {ns['head']}")
    run(f"ip addr add {cluster.address('host')}/{width} dev {cluster.link}")
    run(f"ip link set {cluster.link} up")
    bridge = ["link set lo up", "link add eth0 type bridge", "link set eth0 up"]
    bridge += [f"addr add {cluster.address('head')}/{width} dev eth0"]
    bridge += [f"link add {n} type veth peer name eth0 netns {ns[n]}" for n in cluster.nodes]
    bridge += [f"link set {n} master eth0 up" for n in ("host", *cluster.nodes)]
    ip(cluster, "head", *bridge)
    for node in cluster.nodes:
        address = f"addr add {cluster.address(node)}/{width} dev eth0"
        ip(cluster, node, "link set lo up", address, "link set eth0 up")


def ip(cluster: Cluster, host: str, *lines: str) -> None:
    """Run commands of `ip`, one per line, in the network namespace of a host."""
    run(f"nsenter --net={cluster.folder}/net/{host} ip -batch -", stdin="\n".join(lines))


def inside(cluster: Cluster, host: str, command: str | list[str]) -> list[str]:
    """Return the command line that runs a command on a host."""
    words = shlex.split(command) if isinstance(command, str) else command
    enter = f"nsenter --net={cluster.folder}/net/{host} unshare --uts --mount sh -c".split()
    return [*enter, ENTER, "sh", host, str(cluster.folder), *words]


def delete(cluster: Cluster) -> None:
    """Delete the link of the machine to the cluster."""
    if Path("/sys/class/net", cluster.link).exists():
        # The kernel also deletes it a moment after the namespace at its other end has ended.
        run(f"ip link del {cluster.link}", check=False)
        wait_for("the link is gone", lambda: not Path("/sys/class/net", cluster.link).exists())
