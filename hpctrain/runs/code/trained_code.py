"""The code that a run was trained with: the file `modules.json` of its directory.

    attempt 1 ── builds the model ── modules.json: my_net.py, helper.py
    attempt 3 ── my_net.py differs ─ said, recorded in run.json ── modules.json: my_net.py, too

    {"version": 1, "records": [{"attempt": 1, "modules": {"my_net": {"file": …, "text": …}}},
                               {"attempt": 3, "modules": {"my_net": {…}, "helper": null}}]}

A training depends on its config and on its code. The config decides the name of the run; so that a
run which failed by an error in the code can go on with better code, the code does not. Then it is
said what has changed. A record has only what differs from those before, and null for what is gone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.disk import read_json, write_atomically
from hpctrain.runs.code import modules
from hpctrain.runs.code.modules import Module
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)
_VERSION = 1
CHOICE = (
    "name=OTHER makes another run of the same config; train.from_scratch=true keeps this directory "
    "under another name and starts at step 0"
)


def record(config: Config, run: RunDir, loaded: Sequence[str] = ()) -> None:
    """Note with which modules the last attempt trains, if they are others than before.

    Args:
        config: The config.
        run: The run directory.
        loaded: Names of modules that the attempt has imported.

    Raises:
        OSError: The file cannot be written.
    """
    records = _records(run.path)
    before = _merged(records)
    now = modules.find(config, also=[*before, *loaded])
    if not modules.difference(before, now, ""):
        return
    changed: dict[str, Any] = {
        name: module._asdict() for name, module in now.items() if before.get(name) != module
    }
    changed |= dict.fromkeys(before.keys() - now.keys())
    _write(run, [*records, {"attempt": len(run.read()["attempts"]), "modules": changed}])


def inherit(parent: RunDir, run: RunDir, step: int) -> None:
    """Note the code of a checkpoint with which a run begins, as if an attempt 0 had made it.

    Args:
        parent: The run whose checkpoint it is.
        run: The new run.
        step: The step of the checkpoint.

    Raises:
        OSError: The file cannot be written.
    """
    last = _maker(parent.read(), step)
    if before := _merged([one for one in _records(parent.path) if one["attempt"] <= last]):
        modules_of = {name: module._asdict() for name, module in before.items()}
        _write(run, [{"attempt": 0, "modules": modules_of}])


def changes(config: Config, run: RunDir, folders: Sequence[Path] | None = None) -> str:
    """Return in one line how the code differs from that which made the checkpoints of a run.

    Args:
        config: The config.
        run: The run directory.
        folders: Where Python looks for modules; None means those of this process.

    Returns:
        "" if nothing differs, or nothing is known, or nothing of an older training would go on.
    """
    content, step = run.read(), run.last_checkpoint()
    finished = content.get("state") == "finished"
    maker = len(content.get("attempts", [])) if finished else _maker(content, step)
    known = [one for one in _records(run.path) if one["attempt"] <= maker]
    if not known or not (step or finished):
        return ""
    before = _merged(known)
    now = modules.find(config, folders, also=before)
    attempt = known[-1]["attempt"]
    return modules.difference(before, now, f"attempt {attempt}" if attempt else "the branch")


def warn(config: Config, run: RunDir) -> None:
    """Log a warning if the code of now is not that which has made the checkpoints of a run."""
    if changed := changes(config, run):
        log.warning("%s was trained with other code than that of now: %s", run.name, changed)


def turning_points(content: Mapping[str, Any]) -> dict[int, str]:
    """Return the steps of the checkpoints from which a run went on with other code, and which.

    Args:
        content: The content of run.json.
    """
    return {
        int(one.get("first_step", 0)): str(one["code_changed"])
        for one in content.get("attempts") or ()
        if one.get("code_changed") and not one.get("misfit")
    }


def _maker(content: Mapping[str, Any], step: int) -> int:
    """Return the number, from 1, of the attempt that made a checkpoint; 0 if a parent had it."""
    attempts, reached = content.get("attempts", []), step
    for number in range(len(attempts), 0, -1):
        first = int(attempts[number - 1].get("first_step", 0))
        if first < reached:
            return number
        reached = first
    return 0


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run; empty if there are none, or the file is not ours."""
    try:
        content = read_json(path / "modules.json")
        if content["version"] != _VERSION:
            return []
        return [
            {
                "attempt": int(one["attempt"]),
                "modules": {
                    str(name): each and {"file": str(each["file"]), "text": str(each["text"])}
                    for name, each in one["modules"].items()
                },
            }
            for one in content["records"]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _write(run: RunDir, records: Sequence[Mapping[str, Any]]) -> None:
    text = json.dumps({"version": _VERSION, "records": records}, indent=1)
    write_atomically(run.path / "modules.json", text + "\n")


def _merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Module]:
    found: dict[str, Any] = {}
    for one in records:
        found |= one["modules"]
    return {name: Module(**each) for name, each in found.items() if each}
