"""What NCCL's watchdog leaves when a collective operation of GPUs times out.

    a rank       ── prepare ── TORCH_FR_DUMP_TEMP_FILE ── import torch
    its watchdog ── RUN/logs/flight_recorder_RANK, a line in the log of the rank ── abort: 134
    the verdict  ── timeout ── "ALLREDUCE number 29 has timed out on rank 3"

With NCCL the main thread of a rank gets no exception: the watchdog, a thread of torch, ends the
process. The file has the last collective operations of the rank, with their stacks.
"""

import os
import re
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

PREFIX = "flight_recorder_"
# The second name is the older one; torch reads either.
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_TIMEOUT = re.compile(
    rb"Watchdog caught collective operation timeout: \w+\(SeqNum=(\d+), OpType=(\w+)"
)
_TAIL_BYTES = 2**20  # of a log; the watchdog's line is followed by a stack


def prepare(logs: Path, rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch write its flight recorder into the logs of this run. Call it before torch.

    Rank 0 removes the files of earlier attempts. What the user has exported is kept.
    """
    if rank == 0:
        for file in logs.glob(f"{PREFIX}*"):
            with suppress(OSError):
                file.unlink()
    if environment.get(_FILE[0], PREFIX).endswith(PREFIX) and _FILE[1] not in environment:
        environment[_FILE[0]] = str(logs / PREFIX)
        environment.setdefault(_DUMP, "1")


def timeout(logs: Path, job_id: str) -> str:
    """Return which collective operation has timed out in this attempt; "" if none is known to."""
    ranks = sorted(
        int(number)
        for file in logs.glob(f"{PREFIX}*")
        if (number := file.name[len(PREFIX) :]).isdigit()
    )
    for rank in ranks:
        if found := _TIMEOUT.findall(_tail(logs / f"{job_id}.rank{rank}.log")):
            number, operation = found[-1]
            return (
                f"{operation.decode()} number {number.decode()} has timed out on rank {rank} after "
                f"parallel.timeout_s (torch's flight recorder: {logs / PREFIX}*)"
            )
    return ""


def _tail(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            return stream.read()
    except OSError:
        return b""
