"""The history of each host: one line of JSON for each time that it was checked.

OUTPUT_DIR/doctor/history.jsonl
{"time": 1767225600.0, "host": "node1", "by": "doctor", "verdict": "warn", "findings": [...],
 "figures": {...}}

Findings that have passed are left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.disk import parse_json
from hpctrain.doctor.finding import Finding, worst
from hpctrain.runs.excluded_hosts import folder_of

_NAME = "history.jsonl"


def add(
    output_dir: str,
    by: str,
    places: Mapping[str, Sequence[Finding]],
    figures: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Append the result of a check. Several jobs may do so at once.

    Args:
        output_dir: The config key `output_dir`.
        by: Who has checked: "doctor", or the name of a run.
        places: The findings of each host.
        figures: What was measured of each host, by name.
    """
    folder = folder_of(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "time": time.time(),
                "host": host,
                "by": by,
                "verdict": worst(findings),
                "findings": [one.facts() for one in findings if one.verdict in ("warn", "fail")],
                "figures": dict((figures or {}).get(host, {})),
            }
        )
        for host, findings in places.items()
    ]
    # One write into a file that is open for appending is not mixed with that of another process.
    descriptor = os.open(folder / _NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(descriptor, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(descriptor)


def read(output_dir: str) -> list[dict[str, Any]]:
    """Return all entries, the oldest first; a line that is damaged is left out."""
    try:
        lines = (folder_of(output_dir) / _NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"time", "host", "verdict"} <= entry.keys():
            entries.append(entry)
    return entries
