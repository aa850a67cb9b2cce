"""Runs whose directories are written by hand, so that each figure of a report is known exactly."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hpctrain.insight.report.account.run_account import RunAccount, read

BEGIN = 1_800_000_000.0
PARTS = (
    *("startup", "compile", "compute", "communication", "data_wait"),
    *("checkpoint", "evaluation", "other"),
)


def metrics(attempt: int, at: float, step: int, **values: Any) -> dict[str, Any]:
    """Return a record of metrics; `_` in a name stands for `/`, the first time."""
    named = {name.replace("_", "/", 1): value for name, value in values.items()}
    return {
        "kind": "metrics",
        "attempt": attempt,
        "time": BEGIN + at,
        "step": step,
        "metrics": named,
    }


def spent(attempt: int, at: float, step: int, **seconds: float) -> dict[str, Any]:
    """Return a record of where time went."""
    parts = dict.fromkeys(PARTS, 0.0) | seconds
    return {"kind": "time", "attempt": attempt, "time": BEGIN + at, "step": step, "seconds": parts}


def attempt(begin: float, end: float | None = None, **facts: Any) -> dict[str, Any]:
    """Return an attempt of run.json; without an end it was killed, or it runs."""
    ended = {} if end is None else {"ended": BEGIN + end, "state": "finished"}
    known = {"launcher": "single", "world_size": 1, "nodes": 1, "hosts": ["n1"], "first_step": 0}
    return {"started": BEGIN + begin, **known, **ended, **facts}


def write_run(
    folder: Path,
    attempts: Iterable[Mapping[str, Any]],
    events: Iterable[Mapping[str, Any]] = (),
    *,
    state: str = "finished",
    config: Mapping[str, Any] | None = None,
    sensors: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
    **record: Any,
) -> Path:
    """Write a run directory and return it.

    Args:
        folder: The directory.
        attempts: What `attempt` returns.
        events: The records of the journal; `superseded` gets the position of the record whose
            number is its `from`.
        state: The state in run.json.
        config: Sections of the config.
        sensors: The lines of the monitor, by node.
        **record: More keys of run.json.
    """
    (folder / "journal").mkdir(parents=True)
    lines: list[bytes] = []
    for event in events:
        body = dict(event)
        if body["kind"] == "superseded":
            body["from"] = sum(map(len, lines[: body["from"]]))
            body["to"] = sum(map(len, lines))
        lines.append(json.dumps(body).encode() + b"\n")
    (folder / "journal" / "events.jsonl").write_bytes(b"".join(lines))
    content = {"uid": folder.name, "signature": "0", "data_digest": "d", "state": state}
    content |= {"attempts": [*attempts], **record}
    (folder / "run.json").write_text(json.dumps(content))
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"metric": "val/accuracy", **(config or {})})
    )
    for node, samples in (sensors or {}).items():
        (folder / "monitor").mkdir(exist_ok=True)
        text = "".join(
            json.dumps({"number": number, **sample}) + "\n" for number, sample in enumerate(samples)
        )
        (folder / "monitor" / f"{node}.jsonl").write_text(text)
    return folder


def account(run: Path, now: float = 10_000.0) -> RunAccount:
    """Return the account of a run, `now` seconds after BEGIN."""
    (found,) = read([run], BEGIN + now)
    return found
