"""What the machine must have: Debian packages, privileges and a free subnet."""

from __future__ import annotations

import ipaddress
import json
import shutil
import sys

from dev_cluster.cluster import SETTING, Cluster
from dev_cluster.command import Failure, require_root, run

PACKAGES = {  # name of a Debian package: a program in it
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "slurm-client": "sinfo",
    "munge": "munged",
    "mariadb-server": "mariadbd",
    "iproute2": "ip",
    "util-linux": "unshare",
}

# This script tries everything that `up` needs, in namespaces that end with it.
PROBE = """\
hostname probe && ip link add probe0 type bridge &&
ip link add probe1 type veth peer name probe2 && mount -t tmpfs none /sys/fs/cgroup &&
mknod /sys/fs/cgroup/probe c 1 3
"""


def check(cluster: Cluster) -> None:
    """Raise Failure if a cluster cannot run here. This changes nothing."""
    if sys.platform != "linux":
        raise Failure(f"needs Linux (namespaces, bridge), and this is {sys.platform}", 4)
    missing = [name for name, tool in PACKAGES.items() if not shutil.which(tool)]
    if missing:
        raise Failure(
            f"missing: {' '.join(missing)}. On Debian or Ubuntu: "
            f"apt-get install --no-install-recommends {' '.join(missing)}",
            3,
        )
    require_root()
    try:
        run(["unshare", "--net", "--uts", "--mount", "sh", "-c", PROBE])
    except Failure as error:
        raise Failure(
            "needs to make namespaces (network, UTS, mount), a bridge, veth links, mounts and "
            "device nodes: a container must be given CAP_SYS_ADMIN, CAP_NET_ADMIN and "
            f"CAP_MKNOD (docker run --privileged). {error}",
            4,
        ) from None
    used = [
        f"{route['dst']} on {route.get('dev')}"
        for route in json.loads(run("ip -j -4 route") or "[]")
        if route["dst"] != "default" and route.get("dev") != cluster.link
        if cluster.net.overlaps(ipaddress.ip_network(route["dst"]))
    ]
    if used:
        raise Failure(
            f"{cluster.net} is already in use here ({', '.join(used)}); choose another subnet: "
            f"{SETTING}={cluster.folder}:192.168.77.0/24"
        )
    cluster.check_folder()
