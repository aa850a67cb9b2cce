"""The ports of InfiniBand adapters, by the files of the kernel: state and rate.

/sys/class/infiniband/mlx5_0/ports/1/state              4: ACTIVE
                                     /rate               400 Gb/sec (4X NDR)
"""

import ctypes
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.files.disk import text_of
from hpctrain.insight.doctor.finding import Finding, judged

_FOLDER = Path("/sys/class/infiniband")
_LIBRARY = "libibverbs.so.1"


def _ports(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/ports/*"))


def _is_active(port: Path) -> bool:
    return "ACTIVE" in text_of(port / "state")


def rates(folder: Path = _FOLDER) -> str:
    """Return the rates of the active ports, which are the same on all nodes: `4 x 400 Gb/sec`."""
    counted = Counter(text_of(port / "rate").strip() for port in _ports(folder) if _is_active(port))
    return ", ".join(f"{count} x {rate}" for rate, count in sorted(counted.items())) or "none"


def is_used(folder: Path = _FOLDER, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether NCCL between nodes would use these adapters, if their library works."""
    chosen = env.get("NCCL_NET", "IB").upper().startswith("IB")  # others are TCP and plug-ins
    on = chosen and env.get("NCCL_IB_DISABLE", "0") == "0"
    return on and any(map(_is_active, _ports(folder)))


def library() -> Finding:
    """Check that the library can use the adapters, as NCCL would."""
    try:
        verbs, count = ctypes.CDLL(_LIBRARY), ctypes.c_int()
        verbs.ibv_get_device_list.restype = ctypes.c_void_p
        if found := verbs.ibv_get_device_list(ctypes.byref(count)):
            verbs.ibv_free_device_list(ctypes.c_void_p(found))
        why = "" if count.value else f"{_LIBRARY} has no provider for these adapters"
    except (OSError, AttributeError) as error:
        why = str(error)
    return judged(
        "InfiniBand library",
        not why,
        f"{why}: NCCL falls back to TCP" if why else "loads, and has the adapters",
        "the library and the provider of each adapter",
        "Install libibverbs1, ibverbs-providers and librdmacm1 (RHEL: rdma-core) on the node or in "
        "the container image, and let the container have /dev/infiniband.",
    )
