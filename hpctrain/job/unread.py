"""An error within a task becomes one that names what the task got.

KeyError: 'temprature'                    ── the batch lacks it ──── the fields of the batch
AttributeError: 'tuple' object has no …   ── raised in the task ──── what the model returned

Only the object that the failing expression names is meant: a model which looks into a dict of its
own, and fails, has a batch in some frame above it, too.
"""

from __future__ import annotations

import ast
import difflib
import linecache
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

from hpctrain.config.schema import Config
from hpctrain.data.loading.collate import MASK
from hpctrain.tasks.outputs import described


def unread_problem(error: Exception, config: Config) -> str:
    """Return what a task could not read, if the error was raised there; otherwise ""."""
    cause: BaseException = error
    while cause.__cause__ is not None:  # a pipeline adds the number of the stage
        cause = cause.__cause__
    steps = list(_steps(cause.__traceback__))
    if not steps or not isinstance(cause, AttributeError | TypeError | KeyError):
        return ""
    frames, expression = [step.tb_frame for step in steps], _expression(steps[-1])
    place = f"{frames[-1].f_code.co_filename}:{steps[-1].tb_lineno}"
    if isinstance(cause, KeyError) and cause.args and isinstance(cause.args[0], str):
        for value in _receivers(expression, frames[-1]):
            if isinstance(value, dict) and MASK in value and cause.args[0] not in value:
                return _missing_field(cause.args[0], value, _asker(frames, config), place)
    sums = next((frame for frame in reversed(frames) if frame.f_code.co_name == "sums"), None)
    if sums is None or "outputs" not in sums.f_locals:
        return ""
    outputs = sums.f_locals["outputs"]
    if not _is_about(cause, outputs, expression, frames[-1]):
        return ""
    reason = " ".join(str(cause).split())
    return (
        f"task._target_={config.task.get('_target_')} cannot read the model's outputs: {reason} "
        f"({place}); the model returned {described(outputs)}"
    )


def _missing_field(name: str, batch: dict[str, Any], asker: str, place: str) -> str:
    fields = [each for each in batch if each != MASK]
    near = difflib.get_close_matches(name, fields, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    who = f"{asker} asks" if asker else f"{place} asks"
    return (
        f"{who} the batch for {name!r}: {hint}its fields are {', '.join(fields)}, and mask"
        + f" ({place})" * bool(asker)
    )


def _asker(frames: list[FrameType], config: Config) -> str:
    """Return the key and the class whose method has called the frame; "" if none of the config."""
    nodes = {"task": config.task, "model": config.model}
    for key in ("batch_transforms", "val_batch_transforms"):
        found = getattr(config.data, key) or []
        nodes |= {f"data.{key}[{i}]": node for i, node in enumerate(found)}
    nodes |= {f"hooks[{i}]": node for i, node in enumerate(config.hooks)}
    for frame in reversed(frames):
        outer = frame.f_code.co_qualname.partition(".")[0]
        names = {outer, type(frame.f_locals.get("self")).__name__}
        for key, node in nodes.items():
            if str(node.get("_target_")).rpartition(".")[2] in names:
                return f"{key}._target_={node['_target_']}"
    return ""


def _is_about(
    error: BaseException, outputs: Any, expression: ast.expr | None, frame: FrameType
) -> bool:
    """Return whether an error was raised because of what the outputs, or a part of them, are."""
    items = outputs.values() if isinstance(outputs, dict) else outputs
    parts = [outputs, *(items if isinstance(items, list | tuple | type({}.values())) else ())]
    if isinstance(error, AttributeError):
        return any(getattr(error, "obj", None) is part for part in parts)
    if isinstance(outputs, torch.Tensor):  # another operand is the reason
        return False
    if expression is None:
        return frame.f_code.co_name == "sums"
    named = (node.id for node in ast.walk(expression) if isinstance(node, ast.Name))
    values = [frame.f_locals[name] for name in named if name in frame.f_locals]
    return any(value is part for value in values for part in parts)


def _receivers(expression: ast.expr | None, frame: FrameType) -> Iterator[Any]:
    """Yield the objects that are looked into: of `x[…]`, `x.pop(…)` and `itemgetter(…)(x)` the x.

    Where no source is known, these are all local variables.
    """
    match expression:
        case None:
            yield from frame.f_locals.values()
            return
        case ast.Subscript(value=ast.Name(id=name)):
            names = [name]
        case ast.Call(func=function, args=args):
            receiver = function.value if isinstance(function, ast.Attribute) else None
            names = [node.id for node in (receiver, *args) if isinstance(node, ast.Name)]
        case _:
            names = []
    yield from (frame.f_locals[name] for name in names if name in frame.f_locals)


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _expression(step: TracebackType) -> ast.expr | None:
    """Return the expression in which an error was raised; None if the source does not show it."""
    code = step.tb_frame.f_code
    found = [*code.co_positions()][step.tb_lasti // 2]
    line, last, start, end = found
    if line is None or last is None or start is None or end is None:
        return None
    lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):  # the file was edited meanwhile, or it is a statement
        return None
