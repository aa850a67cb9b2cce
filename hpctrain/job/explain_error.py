"""An error of a training becomes one that names what the user can change: `explained`.

KeyError: 'temprature'                    ── the batch lacks it ──── the fields of the batch
AttributeError: 'tuple' object has no …   ── raised in the task ──── what the model returned
mat1 and mat2 shapes cannot be …          ── the innermost layer ─── the keys with its sizes
… no deterministic implementation         ────────────────────────── train.deterministic

Only the object that the failing expression names is meant: a model which looks into a dict of its
own, and fails, has a batch in some frame above it, too. Nothing is recorded while the model works:
all is found in the frames of the traceback.
"""

import ast
import difflib
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import hpctrain
from hpctrain.causes import ANOTHER_RANK, cause_of
from hpctrain.data.loading.collate import MASK
from hpctrain.tasks.outputs import described

_OF_SHAPES = re.compile(
    r"\bshapes?\b|\bsizes?\b|dimension|channels|out of (range|bounds)|\d-?D .*input|broadcast",
    re.IGNORECASE,
)
# What FSDP, DDP, checkpointing and the compiler add to names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module)\.")
_NOT_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")
Nodes = Mapping[str, Mapping[str, Any]]


def explained(error: Exception, nodes: Nodes, model: nn.Module) -> str:
    """Return what is wrong in words of the config; "" if this error is of another kind.

    `nodes` are the sections with a `_target_`, by their keys: `task` and `model` are among them.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:  # a pipeline adds the number of the stage
        cause = cause.__cause__
    if unread := _unread(cause, nodes):
        return unread
    found = _NOT_DETERMINISTIC.search(str(cause))
    if found and torch.are_deterministic_algorithms_enabled():
        return (
            f"train.deterministic=true: torch has no deterministic algorithm for {found[1]}; "
            "replace the operation in the model or the task, or use train.deterministic=false"
        )
    return _misshaped(cause, nodes, model)


def _unread(cause: BaseException, nodes: Nodes) -> str:
    """Return what a task could not read, if the error was raised there."""
    frames, at = _frames(cause), traceback.extract_tb(cause.__traceback__)
    if not frames or not isinstance(cause, AttributeError | TypeError | KeyError):
        return ""
    expression, place = _expression(at[-1]), f"{at[-1].filename}:{at[-1].lineno}"
    if isinstance(cause, KeyError) and cause.args and isinstance(cause.args[0], str):
        for value in _receivers(expression, frames[-1]):
            if isinstance(value, dict) and MASK in value and cause.args[0] not in value:
                return _missing_field(cause.args[0], value, _asker(frames, nodes), place)
    sums = next((frame for frame in reversed(frames) if frame.f_code.co_name == "sums"), None)
    if sums is None or "outputs" not in sums.f_locals:
        return ""
    outputs = sums.f_locals["outputs"]
    if not _is_about(cause, outputs, expression, frames[-1]):
        return ""
    reason = " ".join(str(cause).split())
    return (
        f"task._target_={nodes['task'].get('_target_')} cannot read the model's outputs: {reason} "
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


def _asker(frames: list[FrameType], nodes: Nodes) -> str:
    """Return the key and the class whose method has called the frame; "" if none of the config."""
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
    """Yield the x of `x[…]`, `x.pop(…)` and `itemgetter(…)(x)`; without a source all variables."""
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


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _expression(at: traceback.FrameSummary) -> ast.expr | None:
    """Return the expression in which an error was raised; None if the source does not show it."""
    if at.lineno is None or at.colno is None:
        return None
    source = linecache.getlines(at.filename)[at.lineno - 1 : at.end_lineno]
    if not source:
        return None
    lines = [text.encode() for text in source]  # the columns count bytes
    lines[-1] = lines[-1][: at.end_colno]
    lines[0] = lines[0][at.colno :]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):  # the file was edited meanwhile, or it is a statement
        return None


def _misshaped(cause: BaseException, nodes: Nodes, model: nn.Module) -> str:
    """Return what does not fit, if the error is one about shapes."""
    reason = " ".join(str(cause).split())
    if not _OF_SHAPES.search(reason) or cause_of(cause) is ANOTHER_RANK:
        return ""
    frames = _frames(cause)
    names = {module: _WRAPPERS.sub("", name) for name, module in model.named_modules()}
    working = [f for f in frames if isinstance(f.f_locals.get("self"), nn.Module)]
    working = [f for f in working if f.f_locals["self"] in names]
    sizes = {k: v for k, v in nodes["model"].items() if _numbers(v) and not k.startswith("_")}
    if not working:
        task = (f for f in frames if f.f_code.co_name in ("sums", "__call__"))
        if not any(isinstance(frame.f_locals.get("batch"), dict) for frame in task):
            return ""
        place = f"the loss of task._target_={nodes['task'].get('_target_')}"
        from_keys = "the sizes of the model are"
    else:
        from_keys = "its sizes follow from"
        layer = working[-1].f_locals["self"]
        own = {n for value in vars(layer).values() for n in _numbers(value)}
        sizes = {key: value for key, value in sizes.items() if own & {*_numbers(value)}} or sizes
        shown = type(layer).__name__ if any(True for _ in layer.children()) else layer
        place = f"the layer {names[layer]} ({shown})" if names[layer] else f"the model ({shown})"
        place += _input(layer, working[-1])
    listed = ", ".join(f"model.{key}={value}" for key, value in sizes.items())
    followed = f"; {from_keys} {listed}" if listed else ""
    return f"{place}: {reason.rstrip('.')}{followed}{_user_code(cause)}"


def _numbers(value: Any) -> list[int]:
    """Return the numbers of a value that is a number, or lists of numbers."""
    if isinstance(value, list | tuple):
        return [n for each in value for n in _numbers(each)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def _input(layer: nn.Module, frame: FrameType) -> str:
    """Return what the first tensor is that a layer was called with, and has no row for."""
    given = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    values = (frame.f_locals.get(name) for name in given)
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if first is None:
        return ""
    found = f" got {str(first.dtype).removeprefix('torch.')} {(*first.shape,)}"
    if isinstance(layer, nn.Embedding) and first.device.type == "cpu":
        rows = layer.num_embeddings
        wrong = first[(first < 0) | (first >= rows)]
        if len(wrong):
            found += f" with {int(wrong[0])}, and has rows for 0 to {rows - 1}"
    return found


def _user_code(error: BaseException) -> str:
    """Return the line of code that has called torch, to be printed below, unless it is ours."""
    theirs, ours = (str(Path(module.__file__ or "").parent) for module in (torch, hpctrain))
    frames = traceback.extract_tb(error.__traceback__)
    caller = next((f for f in reversed(frames) if not f.filename.startswith(theirs)), None)
    if caller is None or caller.filename.startswith(ours):
        return ""
    return f"\n{traceback.format_list([caller])[0].rstrip()}"
