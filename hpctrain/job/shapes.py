"""An error of torch about shapes becomes one that names the layer and the keys of the config.

    RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x64 and 63x256)
    ── the frames of its traceback ── the innermost layer ── the keys with its sizes ── ConfigError

Nothing is recorded while the model works: the layer is found when there is an error.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import hpctrain
from hpctrain.config.schema import Config
from hpctrain.runs.state.failure import is_of_another_rank

_OF_SHAPES = re.compile(
    r"\bshapes?\b|\bsizes?\b|dimension|channels|out of (range|bounds)|\d-?D .*input|broadcast",
    re.IGNORECASE,
)
# What FSDP, DDP, checkpointing and the compiler add to names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module)\.")


def shape_problem(error: Exception, config: Config, model: nn.Module) -> str:
    """Return what does not fit, if an error of the training is one about shapes; otherwise ""."""
    cause: BaseException = error
    while cause.__cause__ is not None:  # a pipeline adds the number of the stage
        cause = cause.__cause__
    reason = " ".join(str(cause).split())
    if not _OF_SHAPES.search(reason) or is_of_another_rank(f"{type(cause).__name__}: {reason}"):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
    names = {module: _WRAPPERS.sub("", name) for name, module in model.named_modules()}
    working = [f for f in frames if isinstance(f.f_locals.get("self"), nn.Module)]
    working = [f for f in working if f.f_locals["self"] in names]
    keys = dict(_sizes(config.model))
    if not working:
        if not any(_is_of_task(frame) for frame in frames):
            return ""
        place = f"the loss of task._target_={config.task.get('_target_')}"
    else:
        layer = working[-1].f_locals["self"]
        own = {n for value in vars(layer).values() for n in _numbers(value)}
        keys = {key: value for key, value in keys.items() if own & {*_numbers(value)}} or keys
        shown = type(layer).__name__ if any(True for _ in layer.children()) else layer
        place = f"the layer {names[layer]} ({shown})" if names[layer] else f"the model ({shown})"
        if given := _input(working[-1]):
            place += f" got {given}{_outside(layer, working[-1])}"
    listed = ", ".join(f"model.{key}={value}" for key, value in keys.items())
    sizes = f"; its sizes follow from {listed}" if listed else ""
    if not working and listed:
        sizes = f"; the sizes of the model are {listed}"
    return f"{place}: {reason.rstrip('.')}{sizes}{_user_code(cause)}"


def _sizes(model: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of the model that are numbers, or lists of numbers."""
    for name, value in model.items():
        if _numbers(value) and not name.startswith("_"):
            yield name, value


def _numbers(value: Any) -> list[int]:
    if isinstance(value, list | tuple):
        return [n for each in value for n in _numbers(each)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def _is_of_task(frame: FrameType) -> bool:
    """Return whether a frame is one of a task, which gets a batch with a mask."""
    batch = frame.f_locals.get("batch")
    return frame.f_code.co_name in ("sums", "__call__") and isinstance(batch, dict)


def _input(frame: FrameType) -> str:
    """Return the dtype and shape of the first tensor that a function was called with."""
    first = _tensor(frame)
    return "" if first is None else f"{str(first.dtype).removeprefix('torch.')} {(*first.shape,)}"


def _outside(layer: nn.Module, frame: FrameType) -> str:
    """Return the first number that an embedding has no row for."""
    numbers = _tensor(frame)
    if not isinstance(layer, nn.Embedding) or numbers is None or numbers.device.type != "cpu":
        return ""
    wrong = numbers[(numbers < 0) | (numbers >= layer.num_embeddings)]
    if not len(wrong):
        return ""
    return f" with {int(wrong[0])}, and has rows for 0 to {layer.num_embeddings - 1}"


def _tensor(frame: FrameType) -> torch.Tensor | None:
    """Return the first tensor that a function was called with."""
    given = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    values = (frame.f_locals.get(name) for name in given)
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def _user_code(error: BaseException) -> str:
    """Return the line of code that has called torch, to be printed below, unless it is ours."""
    theirs, ours = (str(Path(module.__file__ or "").parent) for module in (torch, hpctrain))
    frames = traceback.extract_tb(error.__traceback__)
    caller = next((f for f in reversed(frames) if not f.filename.startswith(theirs)), None)
    if caller is None or caller.filename.startswith(ours):
        return ""
    return f"\n{traceback.format_list([caller])[0].rstrip()}"
