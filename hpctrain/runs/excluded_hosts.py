"""Hosts that new jobs of an `output_dir` avoid, because they have failed a check.

OUTPUT_DIR/doctor/excluded.json    {"node3": {"time": 1767225600.0, "why": "GPU 0: ECC"}}
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.disk import read_json, write_atomically
from hpctrain.lock import file_lock, patience

_NAME, _LOCK_S = "excluded.json", 10.0


def folder_of(output_dir: str) -> Path:
    """Return the folder of what is remembered of hosts."""
    return Path(output_dir) / "doctor"


def read(output_dir: str) -> dict[str, dict[str, Any]]:
    """Return the excluded hosts, with the time and the reason."""
    try:
        found = dict(read_json(folder_of(output_dir) / _NAME))
    except (OSError, ValueError, TypeError):
        return {}
    return {host: facts for host, facts in found.items() if isinstance(facts, dict)}


def change(output_dir: str, failed: Mapping[str, str], passed: Iterable[str]) -> None:
    """Exclude hosts, and end the exclusion of others. Several jobs may do so at once.

    Args:
        output_dir: The config key `output_dir`.
        failed: Each host that is excluded, with the reason.
        passed: Hosts that have passed a check.
    """
    passed = set(passed) - failed.keys()
    if not failed and not passed & read(output_dir).keys():
        return
    folder = folder_of(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "excluded.lock"
    with file_lock(lock, patience(_LOCK_S, str(lock))):
        known = {host: facts for host, facts in read(output_dir).items() if host not in passed}
        known |= {host: {"time": time.time(), "why": why} for host, why in failed.items()}
        write_atomically(folder / _NAME, json.dumps(known, indent=1) + "\n")
