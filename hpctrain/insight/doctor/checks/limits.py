"""Limits of the operating system: cores, locked memory, open files, and shared memory."""

import os
import resource
from collections.abc import Iterator

from rich.filesize import decimal

from hpctrain.base.units import GIB, MIB
from hpctrain.insight.doctor.finding import Finding, Result, bad, bounded, good, judged

# NCCL and torch pass data between the ranks of a node through /dev/shm; Docker's default is 64 MiB,
# and NCCL's guide advises 1 GiB, as the notes of HugeCTR and TensorRT-LLM quote it
# (docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#sharing-data).
_FAIL_SHM, _WARN_SHM, _WARN_SHM_GPUS = 32 * MIB, 64 * MIB, GIB
_FAIL_FILES, _WARN_FILES = 512, 1024
_LOCKED = 64 * MIB


def checked(gpu_ranks: int, infiniband: bool) -> Iterator[Finding]:
    """Check the limits of a node with so many ranks with GPUs, and whether NCCL has InfiniBand."""
    facts = os.statvfs("/dev/shm")
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    yield shared_memory(size, free, gpu_ranks)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], infiniband)


def cpus(count: int, real: int, asked: int) -> Finding:
    """Judge the CPUs that a rank may use against `launch.cpus_per_task`; `real` are its cores."""
    otherwise: Result = "fail" if 2 * count <= asked else "warn"
    found = f"{count} CPUs, {real} cores"
    return judged("CPU cores", count >= asked, found, otherwise, asked=asked)


def shared_memory(size: int, free: int, gpu_ranks: int = 0) -> Finding:
    """Judge /dev/shm by its free bytes; it should be larger for several ranks with GPUs."""
    least = _WARN_SHM_GPUS if gpu_ranks > 1 and size < _WARN_SHM_GPUS else _WARN_SHM
    found, bounds = f"{decimal(free)} free of {decimal(size)}", (_FAIL_SHM, least)
    return bounded("/dev/shm", free, found, bounds, least=decimal(least))


def open_files(soft: int, hard: int) -> Finding:
    """Judge `ulimit -n`."""
    count = float("inf") if soft == resource.RLIM_INFINITY else soft
    check, bounds = "open files (ulimit -n)", (_FAIL_FILES, _WARN_FILES)
    own = hard == resource.RLIM_INFINITY or hard >= _WARN_FILES  # the user may set it
    kind = check if own else "hard limit of files"
    return bounded(kind, count, f"{count:,}", bounds, check, least=_WARN_FILES, hard=hard)


def locked_memory(soft: int, has_infiniband: bool) -> Finding:
    """Judge `ulimit -l`, which InfiniBand needs for the memory that it reads and writes."""
    check = "locked memory (ulimit -l)"
    if soft == resource.RLIM_INFINITY:
        return good(check, "unlimited")
    found = decimal(soft)
    if not has_infiniband:
        return good(check, f"{found}; only InfiniBand between GPUs of several nodes needs more")
    return bad(check, "fail" if soft < _LOCKED else "warn", found)
