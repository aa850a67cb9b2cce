"""What a new job inherits of the environment that it is submitted from.

`sbatch` passes everything on. Submitted from inside an allocation, an `salloc` shell or another
launcher's job, the new job would take over that one's shape: reports go up to 8 ranks pinned to
4 cores for days (`SLURM_CPU_BIND`), a fatal `SLURM_MEM_PER_CPU` beside `SLURM_MEM_PER_NODE`, or
the GPU mask of another node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_FOREIGN = re.compile(
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SPANK)_\w*"  # the other allocation
    r"|(PMI|PMI2|PMIX|OMPI|PRTE|PALS|HYDI|MV2_COMM|SUBMITIT|TORCHELASTIC)_\w*|MPI_LOCAL\w*"
    r"|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME"  # its ranks
    r"|(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"  # its GPUs
    r"|(SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO)_\w*"  # how people like to see the queue
    r"|OMP_NUM_THREADS|HPCTRAIN_(LAUNCHER|REQUEUE_NOTE)"
)
# How Slurm's own commands find and convince the controller.
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}


def clean_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a new job may inherit of this process's environment."""
    return {
        name: value for name, value in env.items() if name in _KEPT or not _FOREIGN.fullmatch(name)
    }
