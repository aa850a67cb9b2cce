"""The number of nodes of a job whose `launch.nodes` is a range, or that has spare nodes.

    launch.nodes=3-9 ── 4 and 8 fit ── sbatch --nodes=4-8 ── the job gets 6 ── srun --nodes=4

The scheduler knows no gaps in a range. So the ranks start on the largest number of nodes that fits,
and the other nodes of the job stay idle.

    launch.nodes=4 launch.spares=1 ── sbatch --nodes=5 --no-kill ── srun --nodes=4

A spare takes the place of a node that is lost: with --no-kill Slurm only takes that one away.
"""

from collections.abc import Iterator, Sequence

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import LaunchConfig, SiteConfig


def node_options(
    launch: LaunchConfig, site: SiteConfig, fitting: Sequence[int]
) -> dict[str, str | int | bool]:
    """Return the options of sbatch for the number of nodes, if these are fitting, and of ranks.

    A `site.gpu_option` that does not work with a range is a ConfigError.
    """
    if len(launch.node_numbers) == 1:
        nodes = launch.node_numbers[0] + launch.spares
        lost = {"no-kill": True} if launch.spares else {}
        return {"nodes": nodes, "ntasks-per-node": launch.tasks_per_node, **lost}
    if launch.gpus_per_node and site.gpu_option == "gpus-per-task":
        raise ConfigError(
            f"site.gpu_option=gpus-per-task with launch.nodes={launch.nodes}: sbatch multiplies it "
            "by the number of tasks, which a range leaves open; use gpus-per-node or gres"
        )
    # With --ntasks-per-node=T, Slurm makes a job of T tasks for each node of the smallest number,
    # and gives N tasks at most N nodes. So the job has no tasks, and asks for the CPUs of a node.
    cpus = launch.tasks_per_node * launch.cpus_per_task
    return {"nodes": f"{fitting[0]}-{fitting[-1]}", "mincpus": cpus}


def rank_options(launch: LaunchConfig) -> list[str]:
    """Return the options of srun that start the ranks, as words of the script."""
    tasks = launch.tasks_per_node
    if len(launch.node_numbers) == 1 and not launch.spares and launch.pack == 1:
        return []
    return ['--nodes="$nodes"', f'--ntasks="$((nodes * {tasks}))"', f"--ntasks-per-node={tasks}"]


def choose_nodes(launch: LaunchConfig, fitting: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the script that set `$nodes`, the number of nodes with ranks."""
    if len(launch.node_numbers) == 1:
        yield f"nodes={launch.node_numbers[0]}"
        return
    yield "\n# The ranks run on the largest number of nodes that fits the batch and the degrees."
    yield f"for nodes in {' '.join(map(str, reversed(fitting)))}; do"
    yield "    ((nodes <= SLURM_JOB_NUM_NODES)) && break"
    yield "done"
    if _gaps(fitting):
        yield "if ((nodes < SLURM_JOB_NUM_NODES)); then"
        yield '    echo "warning: of $SLURM_JOB_NUM_NODES nodes only $nodes are used:" \\'
        yield f'        "launch.nodes={launch.nodes}, and {listed(fitting)} fit" >&2'
        yield "fi"


def _gaps(fitting: Sequence[int]) -> bool:
    return len(fitting) <= fitting[-1] - fitting[0]


def listed(numbers: Sequence[int], between: str = ", ") -> str:
    """Return sorted numbers as text, successive ones as a range: `4, 6-8`."""
    known = {*numbers}
    starts = [n for n in numbers if n - 1 not in known]
    ends = [n for n in numbers if n + 1 not in known]
    pairs = zip(starts, ends, strict=True)
    return between.join(f"{a}-{b}" if b > a else str(a) for a, b in pairs)
