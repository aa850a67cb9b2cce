"""The call of a function, as files, for `hpctrain.submit_function`.

    OUTPUT_DIR/functions/2026-01-31_12-00-00_000000-fit/
        call.json     module, function, arguments, the digest of the code's copy
        job.sh        the batch script; job_id, tasks/ and batch/ as in `hpctrain.launch.arrays`
        logs/         output of the ranks
        results/0.json …   {"value": …} or {"error": traceback, "time": …}, one file for each rank

The values are JSON, so no pickle is written or read.
"""

from __future__ import annotations

import importlib
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base import secrets
from hpctrain.base.errors import ConfigError, DamageError, StorageError
from hpctrain.base.files.disk import LARGEST_JSON, parse_json, write_atomically
from hpctrain.base.files.record import Record, read, read_bytes, written

_TYPES = "None, bool, int, float, str, and lists and dicts of these"


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    module: str
    name: str  # in the module, with dots for a method of a class
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        """Check and describe a call.

        It is a ConfigError if a job could not import the function, it does not take these
        arguments, or an argument cannot be written.
        """
        module = getattr(function, "__module__", None)
        name = getattr(function, "__qualname__", None)
        if not module or not name or not callable(function):
            raise ConfigError(
                f"{function!r}: not a function that a job can import: give a function of a module, "
                "and its arguments"
            )
        if module == "__main__":
            raise ConfigError(
                f"{name} is defined in the program that runs now (or in a notebook), which a job "
                "cannot import: put it into a module beside the program, and import it from there"
            )
        call = cls(module, name, args, kwargs)
        if "<" in name or call._find() is not function:
            raise ConfigError(
                f"{module}.{name} is not at the top of its module, so a job cannot import it (a "
                "lambda or a function inside a function cannot be submitted): write it with `def` "
                "at the top of a module"
            )
        text = call._text()
        with suppress(ValueError):  # some functions of C do not tell their arguments
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise ConfigError(f"{module}.{name}{signature}: {error}") from error
        for value, variable in secrets.known().items():
            if json.dumps(value)[1:-1] in text:
                raise ConfigError(
                    f"{module}.{name}: an argument has the value of {variable}, which would be "
                    f"written to a file: let the function read os.environ[{variable!r}]"
                )
        if secrets.written_down(text):
            raise ConfigError(
                f"{module}.{name}: an argument holds a password or token, which would be written "
                "to a file: export it, and let the function read os.environ"
            )
        return call

    @classmethod
    def read(cls, folder: Path) -> Call:
        """Read the call of a folder; a missing or damaged file is a StorageError."""
        file = folder / "call.json"
        try:
            content = _content(file)
            args, kwargs = [*content["args"]], {**content["kwargs"]}
            return cls(content["module"], content["function"], args, kwargs)
        except DamageError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{file}: cannot be read as a call ({error})") from error

    def write(self, folder: Path, code: str | None) -> None:
        """Write call.json; `code` is the digest of the code's copy."""
        content = json.loads(self._text()) | {"code": code}
        write_atomically(folder / "call.json", written(content))

    def __call__(self) -> Any:
        """Import and call the function."""
        return self._find()(*self.args, **self.kwargs)

    def _find(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part, None)
        return found

    def _text(self) -> str:
        where = f"{self.module}.{self.name}: argument"
        args = [encode(value, f"{where} {i + 1}") for i, value in enumerate(self.args)]
        kwargs = {key: encode(value, f"{where} {key}") for key, value in self.kwargs.items()}
        content = {"module": self.module, "function": self.name}
        return json.dumps(content | {"args": args, "kwargs": kwargs})


def code_of(folder: Path) -> str:
    """Return the digest of the code's copy that the call in a folder uses; "" if it has none."""
    with suppress(FileNotFoundError, DamageError):
        return read(_Stored, folder / "call.json").code or ""
    return ""


class _Stored(Record, frozen=True):
    code: str | None = None


def write_result(folder: Path, rank: int, content: dict[str, Any]) -> None:
    """Write the result of a rank: `{"value": ENCODED}` or `{"error": TRACEBACK}`."""
    file = result_file(folder, rank)
    write_atomically(file, json.dumps(content | {"time": time.time()}) + "\n")


def read_results(folder: Path, ranks: int) -> list[tuple[int, dict[str, Any]]]:
    """Return the results that exist, by rank."""
    found = []
    for rank in range(ranks):
        with suppress(OSError, ValueError, DamageError):
            found.append((rank, _content(result_file(folder, rank))))
    return found


def _content(file: Path) -> Any:
    """Return what a call is made of, or its result: values of a user, which may have any text."""
    return parse_json(read_bytes(file, 1, LARGEST_JSON)[0])


def result_file(folder: Path, rank: int) -> Path:  # noqa: D103
    return folder / "results" / f"{rank}.json"


def encode(value: Any, where: str) -> Any:
    """Return a value as JSON has it: a tuple is a list, a path and the key of a dict are texts.

    Values of NumPy and torch become numbers and lists. A value of another type is a ConfigError, in
    which `where` says what the value is.
    """

    def plain(other: Any) -> Any:
        kind = type(other)
        if isinstance(other, Path):
            return str(other)
        if kind.__module__.partition(".")[0] in ("numpy", "torch") and hasattr(other, "tolist"):
            return other.tolist()
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}")

    try:
        return json.loads(json.dumps(value, default=plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no value of JSON ({error}); allowed are {_TYPES}") from error
