"""This process's place among the ranks, read once from the environment of its launcher.

    os.environ ── RankInfo.from_env() ── RankInfo(rank=2(4), local_rank=0(2), node=1(2), …)

Ranks are started by `srun`, `torchrun` or submitit's local executor; a process without any of them
is a single rank. A batch script and an `salloc` shell have `SLURM_NTASKS` set as well, although
nobody has started those tasks. So a Slurm rank is recognised by `SLURM_STEP_ID`, and its world size
is that of the step, not of the job. What is typed in a shell of `srun --pty bash` has the variables
of a step, too; if that has several tasks, `HPCTRAIN_LAUNCHER=single` says that the others are idle.

This module does not import torch, because the login node and error messages need it quickly.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import DistributedError
from hpctrain.base.names.run_record import AttemptKey
from hpctrain.cluster.ranks.hostlist import expand_hostlist, expand_tasks
from hpctrain.cluster.ranks.port import master_port

# Slurm counts the steps of srun from 0; the shell of `salloc` and the like have the last numbers.
_SPECIAL_STEPS = 0xFFFFFFF0
_ALONE = "HPCTRAIN_LAUNCHER=single trains with this process alone"


@dataclass(frozen=True)
class RankInfo:
    """One process's place in the job; a process alone unless the launcher says more.

    Attributes:
        launcher: What started the process: "slurm", "torchrun", "submitit-local" or "single".
        rank: 0 <= rank < world_size, over all nodes.
        local_rank: 0 <= local_rank < local_world_size, on this node.
        node_rank: 0 <= node_rank < num_nodes.
        master_port: TCP port on which rank 0 (on `master_addr`) listens; 0 for a single process.
        hosts: Node names in the order of the ranks; empty if the launcher does not tell them.
        job_id: The id for `squeue` and `scontrol` (`ARRAYJOB_TASK` for an array task), or "".
        restart_count: How often the launcher has restarted this job.
        step_id: The number of the step of the Slurm job whose tasks the ranks are; 0 elsewhere.
        worker: The folder of the worker whose ranks these are, which train one run after another
            (`hpctrain.search.worker`); "" elsewhere.
        piece: How many trainings these processes have made before, as ranks of a worker.
        until: The global step at which the run pauses; None for its end.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    hosts: tuple[str, ...] = ()
    job_id: str = ""
    restart_count: int = 0
    step_id: int = 0
    worker: str = ""
    piece: int = 0
    until: int | None = None

    def _checked(self) -> RankInfo:
        """Return it, if what the launcher says is possible."""
        for value, count, name in (
            (self.rank, self.world_size, "rank"),
            (self.local_rank, self.local_world_size, "local_rank"),
            (self.node_rank, self.num_nodes, "node_rank"),
        ):
            if not 0 <= value < count:
                raise DistributedError(
                    f"{self.launcher} says {name}={value} of {count}: it must lie in 0..{count - 1}"
                )
        if self.local_world_size > self.world_size or self.num_nodes > self.world_size:
            raise DistributedError(
                f"{self.launcher} says world_size={self.world_size} with "
                f"local_world_size={self.local_world_size} on {self.num_nodes} nodes: "
                "a node has at least one rank and at most all of them"
            )
        return self

    def __str__(self) -> str:
        return (
            f"{self.launcher}: rank={self.rank}({self.world_size}) "
            f"local_rank={self.local_rank}({self.local_world_size}) "
            f"node={self.node_rank}({self.num_nodes}) on {socket.gethostname()}"
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes what all ranks share."""
        return self.rank == 0

    @property
    def attempt_key(self) -> AttemptKey:
        """The key by which records tell this start of the run from others."""
        return AttemptKey(self.job_id, self.restart_count, self.step_id)

    @property
    def one_node(self) -> bool:
        """Whether there are several ranks, and all of them are certainly on this node."""
        # The variables of torchrun, when they are set by hand, need not tell the number of nodes.
        return self.world_size > 1 and self.num_nodes == 1 and self.launcher != "torchrun"

    def folders(self, run: Path) -> list[Path]:
        """Return the directories that tell when these ranks end: of the run, and of the worker."""
        return [run, *map(Path, filter(None, [self.worker]))]

    def host(self, rank: int) -> str:
        """Return the node of a rank, if the launcher tells the nodes; "" otherwise."""
        # Every node has the same number of ranks.
        return self.hosts[rank * len(self.hosts) // self.world_size] if self.hosts else ""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> RankInfo:
        """Read the variables of the launcher. If launchers are nested, the innermost one counts.

        `HPCTRAIN_LAUNCHER=single|slurm|torchrun|submitit-local` overrides the detection, for
        example for a notebook or a debugger inside an allocation.

        Raises:
            DistributedError: A variable is missing, not a number, or contradicts another one.
        """
        readers = {
            "torchrun": _from_torchrun,
            "submitit-local": _from_submitit_local,
            "slurm": _from_slurm,
        }
        launcher = env.get("HPCTRAIN_LAUNCHER") or _detect(env)
        if launcher == "single":
            restarts = _number(env, "SLURM_RESTART_COUNT", 0)
            host = socket.gethostname()
            return cls(launcher, hosts=(host,), job_id=_job_id(env), restart_count=restarts)
        if launcher not in readers:
            allowed = ", ".join(sorted([*readers, "single"]))
            raise DistributedError(f"HPCTRAIN_LAUNCHER={launcher}: allowed are {allowed}")
        return readers[launcher](env)._checked()

    def idle_tasks(self, env: Mapping[str, str] = os.environ) -> int:
        """Return how many tasks of the allocation nobody has started.

        It is more than 0 only for a single process in a batch script, a shell or a notebook, which
        would leave the nodes of the other tasks idle.
        """
        if self.launcher != "single" or env.get("HPCTRAIN_LAUNCHER") == "single":
            return 0
        if "SLURM_JOB_ID" not in env:
            return 0
        return max(0, _number(env, "SLURM_NTASKS", 1) - 1)


def gpus_given(asked: int, env: Mapping[str, str] = os.environ) -> int:
    """Return how many GPUs the job has on this node; 0 if that cannot be told.

    `asked` is `launch.gpus_per_node`, which counts where Slurm does not tell it.
    """
    if "MIG-" in env.get("CUDA_VISIBLE_DEVICES", ""):
        return 0  # CUDA shows a process one instance only, however many it has
    given = env.get("SLURM_GPUS_ON_NODE", "")
    return int(given) if given.isdecimal() else asked


def _detect(env: Mapping[str, str]) -> str:
    # torchrun inside an srun step (one agent per node) is usual, srun inside torchrun is not.
    if "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env):
        return "torchrun"
    if env.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in env:
        return "submitit-local"
    return "slurm" if _is_step(env) else "single"


def _is_step(env: Mapping[str, str]) -> bool:
    """Return whether srun has started this process, or a shell in its step, but not `salloc`."""
    return "SLURM_PROCID" in env and 0 <= _number(env, "SLURM_STEP_ID", -1) < _SPECIAL_STEPS


def _from_torchrun(env: Mapping[str, str]) -> RankInfo:
    world_size = _number(env, "WORLD_SIZE")
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", world_size)
    rank = _number(env, "RANK")
    if "TORCHELASTIC_RUN_ID" not in env and _is_step(env):
        # A task of srun may start ranks itself, but the variables of another program fit no task.
        task, tasks = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS", 1)
        if world_size < 1 or world_size % tasks or rank * tasks // world_size != task:
            raise DistributedError(
                f"RANK={rank} and WORLD_SIZE={world_size} are set, but srun has started this "
                f"process as task {task} of {tasks}: another program has left them in the "
                "environment; unset them, or HPCTRAIN_LAUNCHER=slurm ignores them"
            )
    return RankInfo(
        launcher="torchrun",
        rank=rank,
        local_rank=_number(env, "LOCAL_RANK", rank % local_world_size),
        node_rank=_number(env, "GROUP_RANK", rank // local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=_number(env, "GROUP_WORLD_SIZE", max(1, world_size // local_world_size)),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", 29500),
        job_id=_job_id(env),
        restart_count=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _from_submitit_local(env: Mapping[str, str]) -> RankInfo:
    world_size = _number(env, "SUBMITIT_LOCAL_NTASKS")
    job_id = env.get("SUBMITIT_LOCAL_JOB_ID", "0")
    return RankInfo(
        launcher="submitit-local",
        rank=_number(env, "SUBMITIT_LOCAL_GLOBALID"),
        local_rank=_number(env, "SUBMITIT_LOCAL_LOCALID"),
        world_size=world_size,
        local_world_size=world_size,
        master_port=master_port(int(re.sub(r"\D", "", job_id) or 0)),
        hosts=(socket.gethostname(),),
    )


def _from_slurm(env: Mapping[str, str]) -> RankInfo:
    hosts = expand_hostlist(_text(env, "SLURM_STEP_NODELIST"))
    address = env.get("MASTER_ADDR") or hosts[0]
    if len(hosts) > 1 and (address == "localhost" or address.startswith(("127.", "::1"))):
        raise DistributedError(
            f"MASTER_ADDR={address} is another host on each of the {len(hosts)} nodes: unset it"
        )
    world_size = _number(env, "SLURM_STEP_NUM_TASKS")
    tasks_per_node = expand_tasks(_text(env, "SLURM_STEP_TASKS_PER_NODE"))
    node_rank = _number(env, "SLURM_NODEID")
    if sum(tasks_per_node) != world_size or len(tasks_per_node) != len(hosts):
        raise DistributedError(
            f"SLURM_STEP_NUM_TASKS={world_size}, but "
            f"SLURM_STEP_TASKS_PER_NODE={env['SLURM_STEP_TASKS_PER_NODE']} on "
            f"SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']} ({len(hosts)} nodes) makes "
            f"{sum(tasks_per_node)} tasks: was one of them exported by hand?"
        )
    if not 0 <= node_rank < len(hosts):
        raise DistributedError(f"SLURM_NODEID={node_rank}, but the step has {len(hosts)} nodes")
    restart_count = _number(env, "SLURM_RESTART_COUNT", 0)
    # Each array task has its own SLURM_JOB_ID, so tasks of one array get different ports.
    step = _number(env, "SLURM_STEP_ID", 0)
    port = master_port(_number(env, "SLURM_JOB_ID"), restart_count + step)
    return RankInfo(
        launcher="slurm",
        rank=_number(env, "SLURM_PROCID"),
        local_rank=_number(env, "SLURM_LOCALID"),
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=tasks_per_node[node_rank],
        num_nodes=len(hosts),
        master_addr=address,
        master_port=_number(env, "MASTER_PORT", port),
        hosts=tuple(hosts),
        job_id=_job_id(env),
        restart_count=restart_count,
        step_id=step,
    )


def _job_id(env: Mapping[str, str]) -> str:
    # `scontrol requeue` with the plain id of an array task would requeue the whole array.
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise DistributedError(f"{name} is not set, though srun sets it for every task; {_ALONE}")
    return value


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name, "").strip()
    if not value and default is not None:
        return default
    try:
        return int(value)
    except ValueError:
        shown = f"={value!r}: it must be a whole number" if value else f" is not set; {_ALONE}"
        raise DistributedError(f"{name}{shown}") from None
