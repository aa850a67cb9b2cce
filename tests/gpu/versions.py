"""Print the versions that the results of tests/gpu depend on, the last line as JSON.

python -m tests.gpu.versions
"""

import json
import platform
import subprocess
from typing import Any

import torch


def versions() -> dict[str, Any]:
    """Return the versions by name; what is not there is None."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **dict.fromkeys(("cudnn", "nccl", "driver", "gpu", "capability", "memory_gib")),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": driver(),
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
        }
    return found


def driver() -> str | None:
    """Return the version of the driver; None if nvidia-smi does not say it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n", 1)[0].strip() or None


if __name__ == "__main__":
    found = versions()
    shown = ("gpu", "driver", "cuda", "nccl", "cudnn", "torch")
    print(", ".join(f"{name} {found[name]}" for name in shown))
    print(json.dumps(found))
