"""The database of Slurm's accounting: a MariaDB of its own, beside slurmdbd on `head`."""

from __future__ import annotations

from pathlib import Path

from dev_cluster.cluster import Cluster
from dev_cluster.command import run
from dev_cluster.network import inside


def socket(cluster: Cluster) -> Path:
    """Return the Unix socket at which the database answers."""
    return cluster.folder / "mariadb" / "socket"


def prepare(cluster: Cluster) -> None:
    """Make the tables of the database when it starts for the first time."""
    socket(cluster).unlink(missing_ok=True)
    data = socket(cluster).parent
    if not any(data.iterdir()):
        run(inside(cluster, "head", f"mariadb-install-db {_options(data)}"))


def database(cluster: Cluster) -> str:
    """Return the command of the database server."""
    data = socket(cluster).parent
    # Only root can use the socket, so there are no passwords. The data are temporary, so there is
    # no fsync.
    return (
        f"mariadbd {_options(data)} --tmpdir={data} --socket={socket(cluster)} --skip-networking "
        "--skip-grant-tables --innodb-flush-log-at-trx-commit=0"
    )


def _options(data: Path) -> str:
    return f"--no-defaults --user=root --datadir={data}"
