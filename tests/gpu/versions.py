"""Print the versions that the results of tests/gpu depend on, the last line as JSON.

python -m tests.gpu.versions
"""

import json
import platform
from typing import Any

import torch

from hpctrain.base.processes import gpu_driver
from hpctrain.engine.distributed import devices
from hpctrain.errors import ConfigError


def versions() -> dict[str, Any]:
    """Return the versions by name; what is not there is None."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": gpu_driver.driver() or None,
        **dict.fromkeys(("cudnn", "nccl", "gpu", "capability", "memory_gib", "no_gpu")),
    }
    try:
        devices.kind("cuda")
    except ConfigError as error:
        return found | {"no_gpu": str(error)}
    gpu = torch.cuda.get_device_properties(0)
    return found | {
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpu": gpu.name,
        "capability": gpu.gcnArchName if torch.version.hip else f"{gpu.major}.{gpu.minor}",
        "memory_gib": round(gpu.total_memory / 2**30, 1),
    }


if __name__ == "__main__":
    found = versions()
    shown = ("gpu", "driver", "cuda", "nccl", "cudnn", "torch")
    print(", ".join(f"{name} {found[name]}" for name in shown))
    print(json.dumps(found))
