"""A Slurm cluster of several nodes on this one machine, with real daemons, for tests.

    slurm/dev-cluster check               say whether it can run here; this changes nothing
    slurm/dev-cluster up --nodes 4        start it, in a few seconds; options such as
                                          --set MaxArraySize=11 give it the limits of your cluster
    eval "$(slurm/dev-cluster env)"       after this sinfo, sbatch, srun, sacct use it
    srun -N4 --ntasks-per-node=2 --gpus-per-node=2 hostname
    slurm/dev-cluster shell node2         open a shell on a node
    slurm/dev-cluster down                end every process, and delete everything

These commands cause the events that can happen to a job on a real cluster:

    slurm/dev-cluster preempt JOB         preempt a job of the partition `preemptible`
    slurm/dev-cluster hurry JOB           start a requeued job now, not after two minutes
    slurm/dev-cluster cut node3           take down the network link of a node
    slurm/dev-cluster kill-daemon node3   kill the slurmd of a node (kill -9)
    slurm/dev-cluster heal node3          undo both; if the node is down for Slurm, reboot it

`up` starts daemons that have died again; queue, accounting and running jobs stay. A job that began
after the last submission, end or change of a job begins anew, as slurmctld had not saved its start.
A submission of the last 5 s before slurmctld died is lost, as slurmctld saves at most every 5 s.
Only if no daemon is left on `head`, `up` deletes everything.

Each node is a network namespace. It has its own host name, /etc/hosts and fake GPUs. It has the
file system and the users of the machine, but FOLDER/scratch is a different folder on each node.
Another namespace, `head`, has the other daemons and the network bridge. So no daemon listens on an
address of the machine, and no firewall rule of the machine applies between two nodes. The machine
itself has the last address of the cluster's subnet.

HPCTRAIN_DEV_CLUSTER=FOLDER[:SUBNET] selects another, independent cluster. The default is
/var/tmp/hpctrain-dev-cluster:10.77.0.0/24.

Exit codes: 0 success, 1 failure, 2 wrong usage, 3 a package is missing, 4 a privilege is missing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys

from dev_cluster import faults, lifecycle, requirements
from dev_cluster.cluster import DEFAULT, SETTING, Cluster
from dev_cluster.command import Failure, require_root, run
from dev_cluster.controller import head_is_up, hurt
from dev_cluster.network import inside

NAME = "slurm/dev-cluster"


def parse(argv: list[str], name: str = NAME) -> argparse.Namespace:
    """Parse the command line; `name` is how the user calls this tool."""
    parser = argparse.ArgumentParser(
        prog=name,
        description=(__doc__ or "").replace(NAME, name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *arguments: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        for argument in arguments:
            sub.add_argument(argument, metavar=argument.upper())
        return sub

    command("check", "say whether a cluster could run here")
    count = command("up", "start the cluster, or heal it when it runs")
    count.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of slurm.conf, such as MaxArraySize=11 or AccountingStorageEnforce=limits; "
        "may be repeated",
    )
    count.add_argument(
        "--nodes", type=int, choices=range(1, 65), metavar="N", help="1-64, default 4"
    )
    command("status", "show daemons, nodes and jobs; the exit code is 0 if everything works")
    end = command("down", "end the cluster and delete all its files")
    end.add_argument("--keep-logs", action="store_true", help="move the logs to FOLDER.logs")
    command("env", 'print the shell commands for eval "$(... env)"')
    shell = command("shell", "open a shell that uses the cluster; with NODE, a shell on that node")
    shell.add_argument("node", nargs="?", metavar="NODE")
    execute = command("exec", "run a command with the cluster's environment: exec -- sinfo")
    execute.add_argument("--node", metavar="NODE", help="run it on that node")
    execute.add_argument("argv", nargs="+", metavar="-- CMD")
    command("cut", "take down the network link of a node", "node")
    command("kill-daemon", "kill -9 the slurmd of a node", "node")
    command("heal", "undo cut and kill-daemon, resume the node", "node")
    command("preempt", "preempt a job of the partition preemptible", "job")
    command("hurry", "let a requeued job start now", "job")
    return parser.parse_args(argv)


def main(argv: list[str], name: str) -> int:
    """Run one command; return the exit code."""
    args = parse(argv, name)
    cluster = Cluster(os.environ.get(SETTING) or DEFAULT)
    if args.command == "check":
        requirements.check(cluster)
        print("a cluster can run here")
        return 0
    if args.command not in ("up", "status", "down") and not cluster.nodes:
        raise Failure(f"no cluster in {cluster.folder}: first `{name} up`")
    if args.command == "env":
        print(f"export SLURM_CONF={shlex.quote(str(cluster.conf))}")
        return 0
    if args.command == "up":
        # Before the check for root, so that every user sees missing packages.
        requirements.check(cluster)
    require_root()
    if args.command in ("up", "down"):
        if os.stat("/proc/self/ns/net").st_ino in cluster.namespaces():
            raise Failure("this is a shell on a node of the cluster: leave it first")
        with lifecycle.setup_lock():
            if args.command == "up":
                if lifecycle.start(cluster, args.nodes, args.set):
                    print(f'to use it: eval "$({name} env)"')
            else:
                lifecycle.end(cluster, args.keep_logs)
                print("down")
    elif args.command == "status":
        return status(cluster)
    elif args.command == "shell":
        os.environ["PS1"] = f"({args.node or 'dev-cluster'}) \\w # "
        execute(cluster, args.node, [os.environ.get("SHELL", "/bin/sh")])
    elif args.command == "exec":
        execute(cluster, args.node, args.argv)
    elif args.command in ("preempt", "hurry"):
        {"preempt": faults.preempt, "hurry": faults.hurry}[args.command](args.job)
    else:
        node = cluster.node(args.node)
        if args.command == "cut":
            faults.cut(cluster, node)
        elif args.command == "heal":
            faults.heal(cluster, node)
        else:
            cluster.kill(node, "slurmd")
        print(f"{args.command} {node}: done")
    return 0


def status(cluster: Cluster) -> int:
    """Print daemons, nodes and jobs; return 0 if everything works, otherwise 1."""
    if not cluster.nodes:
        print(f"no cluster in {cluster.folder}")
        return 1
    daemons = cluster.daemons()
    for (host, program), pid in daemons.items():
        print(f"{host:7} {program:10} {pid or 'not running'}")
    if not head_is_up(cluster):
        return 1
    print()
    print(run("sinfo --Node --long"))
    print()
    print(run("squeue --long"))
    if unusable := hurt(cluster):
        print(f"\nhurt: {', '.join(unusable)}")
    return 1 if unusable else 0


def execute(cluster: Cluster, node: str | None, argv: list[str]) -> None:
    """Replace this process by a command, on this machine or on a node."""
    command = inside(cluster, cluster.node(node), argv) if node else argv
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}", 2) from None


def program(argv: list[str], name: str = NAME) -> int:
    """Run one command with the handling of signals and errors that a program needs."""
    os.umask(0o022)  # every user of the machine may use the cluster
    # `up` cleans up before it goes, also where a script that started it has SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback from `dev-cluster status | head`
    try:
        return main(argv, name)
    except Failure as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        return 130
