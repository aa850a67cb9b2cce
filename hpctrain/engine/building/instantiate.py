"""Make the objects that a `_target_` of the config names."""

import functools
import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import hydra
import hydra.utils
import xxhash
from hydra.errors import InstantiationException

from hpctrain.base.errors import ConfigError
from hpctrain.data.generators import seeded_generators


def instantiate(key: str, node: Mapping[str, Any], *args: Any, seed: int | None = None) -> Any:
    """Call the `_target_` of a config section; what it refuses is a ConfigError.

    With `seed`, the random numbers that it draws are functions of it and of the key.
    """
    number = None if seed is None else xxhash.xxh64_intdigest(f"{seed} {key}".encode()) >> 1
    drawing = nullcontext() if number is None else seeded_generators(number)
    try:
        with drawing:
            made = hydra.utils.instantiate(dict(node), *args, _convert_="all")
    except InstantiationException as error:
        _refuse(f"{key}._target_={node.get('_target_')}", error)

    if isinstance(made, functools.partial):
        # Hydra's own kind looks through all loaded modules at each call. That takes 1 ms, and a
        # transform is called for each sample.
        return functools.partial(made.func, *made.args, **made.keywords)
    return made


def _refuse(named: str, error: InstantiationException) -> NoReturn:
    cause: BaseException = error.__cause__ or error
    while isinstance(cause, ImportError) and cause.__cause__ is not None:
        cause = cause.__cause__  # Hydra's own text about the import says less
    reason = " ".join(f"{type(cause).__name__}: {cause}".split())
    raise ConfigError(f"{named}: {reason}{_frames_of_user(cause)}") from cause


def instantiate_all(
    key: str,
    nodes: Sequence[Mapping[str, Any]],
    kind: type[Any] | tuple[type[Any], ...],
    needed: str,
    seed: int | None = None,
) -> list[Any]:
    """Call the `_target_` of each section of a list; what is not of the kind is a ConfigError."""
    made = [instantiate(f"{key}[{i}]", node, seed=seed) for i, node in enumerate(nodes)]
    for i, one in enumerate(made):
        if not isinstance(one, kind):
            raise ConfigError(
                f"{key}[{i}]={nodes[i]}: it makes a {type(one).__name__}; it must be {needed}"
            )
    return made


def _frames_of_user(error: BaseException) -> str:
    """Return where the error was raised, without the frames of hpctrain, Hydra and the importer."""
    while error.__cause__ is not None:
        error = error.__cause__
    ours = tuple(
        f"{each}{os.sep}" for each in (Path(__file__).parents[2], Path(hydra.__file__).parent)
    )
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*ours, "<frozen "))
        and Path(frame.filename).parent.name != "importlib"
    ]
    return "".join(f"\n{line.rstrip()}" for line in traceback.format_list(frames))
