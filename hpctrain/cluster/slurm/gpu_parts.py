"""Parts of a GPU, which Slurm gives to jobs and steps as its gres `shard` or `mps`.

    gpu:2,shard:8 ── 4 parts a GPU ── launch.gpus_per_run=0.25 ── a step asks for shard:1
                                   ── launch.pack=3            ── the job asks for shard:3

Slurm takes all parts of a job on a node from one GPU, and steps with `--exact` have their parts of
it at the same time. It divides neither the memory nor, with `shard`, the time of the GPU.
"""

import functools
import math

from hpctrain.base.errors import ConfigError
from hpctrain.cluster.slurm.node_kinds import kinds_in
from hpctrain.config.schema import LaunchConfig, SiteConfig

_KINDS = ("mps", "shard")
"""The better one first: with both, Slurm 22.05 does not tell a step of a shard which GPU it has."""


def option(launch: LaunchConfig, site: SiteConfig, runs: int) -> dict[str, str]:
    """Return the option of sbatch or srun for the parts of a GPU that so many runs need.

    A partition that does not offer them is a ConfigError, and no answer an UnreachableError.
    """
    share, where = launch.gpus_per_run or 1.0, site.partition or "that is the default one"
    found = _offered(site.partition)
    kind = next((each for each in _KINDS if found[each]), None)
    if kind is None:
        raise ConfigError(
            f"launch.gpus_per_run={share:g}: no node of the partition {where} has parts of GPUs "
            "(`sinfo -o %G` shows neither shard nor mps). The site must offer them, with GresTypes="
            "gpu,shard in slurm.conf, and in gres.conf Name=shard and a Count of several for each "
            "GPU; else leave the key out"
        )
    # Nodes may divide their GPUs otherwise: a run gets no less than its share on any of them.
    each = max(math.ceil(share * parts - 1e-6) for parts in found[kind])
    if runs * each > max(found[kind]):
        raise ConfigError(
            f"launch.gpus_per_run={share:g} with launch.pack={launch.pack}: the GPUs of the "
            f"partition {where} have {max(found[kind])} parts ({kind}), of which a run needs {each}"
        )
    return {"gres": f"{kind}:{runs * each}"}


@functools.cache
def _offered(partition: str | None) -> dict[str, set[int]]:
    """Return by kind into how many parts the nodes of the partition divide each of their GPUs."""
    found: dict[str, set[int]] = {kind: set() for kind in _KINDS}
    for nodes in kinds_in(partition):
        for kind in _KINDS:
            if (gpus := nodes.count()) and (parts := nodes.count(kind) // gpus):
                found[kind].add(parts)
    return found
