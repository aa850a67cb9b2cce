"""Hosts that new jobs of an `output_dir` avoid, because they have failed a check.

OUTPUT_DIR/doctor/excluded.json    {"node3": {"time": 1767225600.0, "why": "GPU 0: ECC"}}
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.lock import file_lock, patience
from hpctrain.base.files.record import Record, Time, read_known, written
from hpctrain.base.names.run_record import Host
from hpctrain.config.job_request import JobRequest

_NAME, _LOCK_S = "excluded.json", 10.0
# The beginnings of the reasons of a host that was only unlike most hosts of a job.
_UNLIKE = "same GPUs: name", "same GPUs: memory_bytes"


class _Excluded(Record, frozen=True):
    """When and why a host was excluded."""

    time: Time
    why: str = ""


def folder_of(output_dir: str) -> Path:
    """Return the folder of what is remembered of hosts."""
    return Path(output_dir) / "doctor"


def read(output_dir: str) -> dict[Host, _Excluded]:
    """Return the excluded hosts. A damaged file is told in the log, and excludes nobody."""
    return read_known(dict[Host, _Excluded], folder_of(output_dir) / _NAME, parts=2) or {}


def avoided(job: JobRequest) -> list[Host]:
    """Return the hosts that a new job avoids, in alphabetical order.

    A host that is well, and only unlike others, does no harm alone or among nodes that may differ.
    """
    hosts = read(job.output_dir).items()
    return sorted(host for host, facts in hosts if job.alike or not facts.why.startswith(_UNLIKE))


def change(output_dir: str, failed: Mapping[str, str], passed: Iterable[str]) -> None:
    """Exclude the hosts that failed, with the reason, and end the exclusion of those that passed.

    Several jobs may do so at once.
    """
    passed = set(passed) - failed.keys()
    if not failed and not passed & read(output_dir).keys():
        return
    folder = folder_of(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "excluded.lock"
    with file_lock(lock, patience(_LOCK_S, str(lock))):
        known = {host: facts for host, facts in read(output_dir).items() if host not in passed}
        known |= {host: _Excluded(time=time.time(), why=why) for host, why in failed.items()}
        write_atomically(folder / _NAME, written(known))
