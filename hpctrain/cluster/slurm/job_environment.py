"""The part of the environment that a new job may inherit, and the GPUs that a local one sees.

`sbatch` passes the whole environment on. If it is called inside another job or an `salloc` shell,
the new job inherits variables of that job. Known results: 8 ranks that were pinned to 4 cores for
days (`SLURM_CPU_BIND`), a fatal error because both `SLURM_MEM_PER_CPU` and `SLURM_MEM_PER_NODE` are
set, and the GPU mask of another node.
"""

import os
import re
from collections.abc import Mapping, MutableMapping

TRUST = "HPCTRAIN_TRUST"  # the owners whose code may run (`hpctrain.runs.trust`)

_FOREIGN = re.compile(
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SPANK)_\w*"  # variables of the other allocation
    r"|(PMI|PMI2|PMIX|OMPI|PRTE|PALS|HYDI|MV2_COMM|SUBMITIT|TORCHELASTIC)_\w*|MPI_LOCAL\w*"
    r"|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME"  # ranks
    r"|(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"  # GPUs
    r"|(SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO)_\w*"  # personal defaults of Slurm's commands
    r"|OMP_NUM_THREADS|HPCTRAIN_(LAUNCHER|REQUEUE_NOTE|GPUS|LEAD_S|GRACE_S)"
)
# Slurm's commands need these to find the controller and to authenticate.
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}


def clean_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without the variables of the job that this process runs in."""
    return {
        name: value for name, value in env.items() if name in _KEPT or not _FOREIGN.fullmatch(name)
    }


_GPUS, _MASK = "HPCTRAIN_GPUS", "CUDA_VISIBLE_DEVICES"


def keep_gpus(env: MutableMapping[str, str] = os.environ) -> None:
    """Note which GPUs this process sees, for the ranks that it starts on this machine.

    submitit's local executor gives them a mask of its own: no GPU, or the first ones of the
    machine, which may be in use by others.
    """
    env[_GPUS] = f"={env[_MASK]}" if _MASK in env else ""


def take_kept_gpus(env: MutableMapping[str, str] = os.environ) -> None:
    """Let this rank see the GPUs that `keep_gpus` has noted, if it has. Call it before torch."""
    if (kept := env.pop(_GPUS, None)) is None:
        return
    env.pop(_MASK, None)
    if kept:
        env[_MASK] = kept.removeprefix("=")
