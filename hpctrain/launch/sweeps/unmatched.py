"""Refuse what does not fit the model, before anything is queued: patterns, and stored weights.

    optimizer.groups, optimizer.layer_decay, train.lora, checkpoint.init_from
        └── a question for each distinct model
            └── one process that imports torch and builds them without memory ── problems

A command without such keys does not wait for this, and neither do runs that are there already.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from hpctrain.errors import ConfigError
from hpctrain.launch.entry import Entry
from hpctrain.launch.output import say

_TIMEOUT_S = 600.0


def unmatched(entries: Sequence[Entry]) -> list[tuple[Entry, ConfigError]]:
    """Return the new runs with patterns or stored weights that do not fit, each with its error.

    What cannot be known here is said, and found out when the job begins: a model that this machine
    cannot build, for example.
    """
    asked: dict[str, list[Entry]] = {}
    for entry in entries:
        if (question := _question(entry)) and not entry.run.read().state:
            asked.setdefault(question, []).append(entry)
    if not asked:
        return []
    say(
        "the patterns of optimizer.groups or train.lora, or the weights of checkpoint.init_from, "
        "are compared with the model, with torch …"
    )
    found = []
    for answer, same in zip(_answers(list(asked)), asked.values(), strict=True):
        if answer["unknown"]:
            say(
                f"{same[0].run.name}: it is not known here whether they fit: "
                f"{answer['unknown']}; the job will refuse what does not",
                style="yellow",
            )
        found += [(entry, ConfigError(answer["problem"])) for entry in same if answer["problem"]]
    return found


def _question(entry: Entry) -> str | None:
    """Return what is asked of the model of a run, as JSON; None if nothing is."""
    config = entry.config
    lora, optimizer, start = config.train.lora, config.optimizer, config.checkpoint
    patterns = optimizer.groups or lora.patterns
    if not patterns and optimizer.layer_decay is None and start.init_from is None:
        return None
    question = {
        "model": config.model,
        "lora": {"match": lora.match, "rank": lora.rank, "also": lora.also},
        "optimizer": {"groups": optimizer.groups, "layer_decay": optimizer.layer_decay},
        "blocks": config.parallel.blocks,
        "start": {
            "from": start.init_from,
            "rename": start.init_rename,
            "skip": start.init_skip,
        },
    }
    return json.dumps(question, sort_keys=True)


def _answers(questions: list[str]) -> list[dict[str, str]]:
    # It finds what this process finds: classes of a user beside the command, for example.
    path = os.pathsep.join(folder for folder in sys.path if folder)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hpctrain.job.building.match_patterns"],
            env=os.environ | {"PYTHONPATH": path},
            input=f"[{','.join(questions)}]",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [{"problem": "", "unknown": str(error)}] * len(questions)
    try:
        done.check_returncode()
        answers: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
        return answers
    except (subprocess.CalledProcessError, ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [{"problem": "", "unknown": last}] * len(questions)
