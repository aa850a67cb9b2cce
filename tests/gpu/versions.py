"""Print the versions that the results of tests/gpu depend on, the last line as JSON.

On a GPU also how fast a GiB is copied to the memory of background saves: pinned, and as if CUDA had
refused to pin it.

python -m tests.gpu.versions
"""

import json
import platform
import time
from typing import Any

import torch

from hpctrain.base.processes import gpu_driver
from hpctrain.engine.checkpoint.saving.shared_memory import SharedMemory, end_of, places
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


def copies() -> dict[str, Any]:
    """Return whether the memory of background saves is pinned, and GB/s of copies to it."""
    tensors = [torch.ones(1 << 28, device="cuda")]
    placed, memory = places(tensors), SharedMemory()
    memory.reserve(end_of(placed))
    found: dict[str, Any] = {"is_pinned": memory.is_pinned}
    for way in ("pinned", "unpinned"):
        for _ in range(3):  # the first ones make the pages
            begun = time.perf_counter()
            memory.put(tensors, placed, b"")
            found[f"{way}_gb_s"] = tensors[0].nbytes / (time.perf_counter() - begun) / 1e9
        memory.unpin()
    return found


if __name__ == "__main__":
    found = versions()
    if not found["no_gpu"]:
        found |= copies()
    shown = ("gpu", "driver", "cuda", "nccl", "cudnn", "torch")
    print(", ".join(f"{name} {found[name]}" for name in shown))
    print(json.dumps(found))
