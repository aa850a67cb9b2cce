"""An error within a task becomes one that names what the task got.

KeyError: 'temprature'                    ── the batch lacks it ──── the fields of the batch
AttributeError: 'tuple' object has no …   ── raised in the task ──── what the model returned
"""

from __future__ import annotations

import difflib
import traceback
from types import FrameType

from hpctrain.config.schema import Config
from hpctrain.data.loading.collate import MASK
from hpctrain.tasks.outputs import described


def unread_problem(error: Exception, config: Config) -> str:
    """Return what a task could not read, if the error was raised there; otherwise "".

    Args:
        error: With its traceback.
        config: The config.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:  # a pipeline adds the number of the stage
        cause = cause.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    target = config.task.get("_target_")
    if isinstance(cause, KeyError) and cause.args:
        return _missing_field(str(cause.args[0]), frames, target)
    if not isinstance(cause, AttributeError | TypeError | KeyError) or not frames:
        return ""
    last = frames[-1]
    if last.f_code.co_name != "sums" or "outputs" not in last.f_locals:
        return ""
    reason = " ".join(str(cause).split())
    place = f"{last.f_code.co_filename}:{frames[-1].f_lineno}"
    return (
        f"task._target_={target} cannot read the model's outputs: {reason} ({place}); the model "
        f"returned {described(last.f_locals['outputs'])}"
    )


def _missing_field(name: str, frames: list[FrameType], target: object) -> str:
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, dict) and MASK in value and name not in value:
                fields = [each for each in value if each != MASK]
                near = difflib.get_close_matches(name, fields, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                return (
                    f"task._target_={target} asks the batch for {name!r}: {hint}its fields are "
                    f"{', '.join(fields)}, and mask ({frame.f_code.co_filename})"
                )
    return ""
