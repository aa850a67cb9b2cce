"""Refuse arguments that a user's own model, task and so on do not take, before anything is queued.

    `_target_` that is not hpctrain's or torch's own ── a question for each distinct set
        └── one process that imports them: are they there, do they take this? ── problems

Runs that are there already do not wait for this, and neither do those in a container, which has
other packages.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.console import say
from hpctrain.config.rules import targets
from hpctrain.config.rules.objects import Called, called
from hpctrain.launch.entry import Entry

_TIMEOUT_S = 120.0


def refused(entries: Sequence[Entry]) -> list[tuple[Entry, ConfigError]]:
    """Return the new runs with an object that does not fit, each with its error.

    What cannot be known here is said, and found out when the job begins: a module that this machine
    cannot import, for example.
    """
    asked: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.config.site.container.runtime is not None:
            continue
        foreign = [asdict(one) for one in called(entry.config) if not one.is_own]
        if foreign and not entry.run.read().state:
            asked.setdefault(json.dumps(foreign, default=str), []).append(entry)
    found = []
    for answer, same in zip(_answers([*asked]) if asked else [], asked.values(), strict=True):
        if answer["unknown"]:
            say(
                f"{same[0].run.name}: it is not known here whether its own classes fit: "
                f"{answer['unknown']}; the job will refuse what does not",
                style="yellow",
            )
        found += [(entry, ConfigError(answer["problem"])) for entry in same if answer["problem"]]
    return found


def _answers(questions: Sequence[str]) -> list[dict[str, str]]:
    # It finds what this process finds: classes of a user beside the command, for example.
    path = os.pathsep.join(folder for folder in sys.path if folder)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hpctrain.insight.foreign_targets"],
            env=os.environ | {"PYTHONPATH": path},
            input=f"[{','.join(questions)}]",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        answers: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
        return answers
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return [{"problem": "", "unknown": said[-1]}] * len(questions)


def answer(objects: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return `problem`, what is wrong with the objects, and `unknown`, why nobody can tell."""
    problems, unknown = list[str](), ""
    for one in (Called(**each) for each in objects):
        target = one.node["_target_"]
        try:
            try:
                signature = inspect.signature(_found(target))
            except (ValueError, TypeError):  # some functions of C do not tell their arguments
                continue
            # Python does not check the types of a user's class.
            bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
            problems += one.misfits(signature.replace(parameters=bare))
        except LookupError as error:
            problems.append(f"{one.key}._target_={target}: {error.args[0]}")
        except BaseException as error:  # a user's module may raise anything
            unknown = f"{target}: {type(error).__name__}: {error}".splitlines()[0]
    return {"problem": "\n".join(problems), "unknown": unknown}


def _found(target: str) -> Any:
    """Import what a target names; a LookupError if its module does not have it."""
    package, *names = target.split(".")
    found, module = importlib.import_module(package), package
    for name in names:
        if not hasattr(found, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError as error:
                if error.name not in (module, f"{module}.{name}"):
                    raise
                raise LookupError(targets.absent(module, name, vars(found))) from error
        found, module = getattr(found, name), f"{module}.{name}"
    return found


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints goes to standard error
    with output:
        json.dump([answer(objects) for objects in json.load(sys.stdin)], output)
