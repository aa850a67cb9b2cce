"""Damages files as disks, editors and strangers do, and runs the commands that read them."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

CPU_S = 10.0  # far above the second that a command may take, since it may import torch first
WALL_S = 120.0  # for what waits without working; test machines are busy

_READ = re.compile(r"(\.json|\.jsonl|\.yaml|\.gz|lock|stop|failed|\.h5|\.distcp|\.metadata)$")
_NUMBERS = (0, -1, 10**30, 1e30, 1e300, float("nan"), float("-inf"))
# What JSON writes for each of these is what stands in a damaged file.
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1e30,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\x00",
    "\ud800",
    "\u202e\x1b[2J",
    "../../../etc/passwd",
    "--state=RUNNING",
    [],
    {},
    [[]],
    {"": {}},
    [None, 1, "a"],
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(child, (*path, key))


def _with(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    *parents, last = path
    target = value
    for key in parents:
        target = target[key]
    change(target, last)
    return value


def change_json(text: bytes, rng: random.Random) -> bytes:
    """Return a JSON text in which one value is another one, or is missing."""
    value = json.loads(text)
    path = rng.choice(list(_paths(value)))
    new = rng.choice(VALUES)
    if not path:
        value = new
    elif rng.random() < 0.25:
        _with(value, path, lambda target, key: target.pop(key))
    else:
        _with(value, path, lambda target, key: target.__setitem__(key, new))
    return json.dumps(value).encode()


def change_line(text: bytes, rng: random.Random) -> bytes:
    """Return JSON lines in which one value of one line is another one."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = change_json(lines[at], rng)
    return b"\n".join(lines) + b"\n"


def change_numbers(text: bytes, rng: random.Random) -> bytes:
    """Return JSON or JSON lines in which every number is the same other one."""
    new = rng.choice(_NUMBERS)

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(child) for key, child in value.items()}
        if isinstance(value, list):
            return [changed(child) for child in value]
        return new if type(value) in (int, float) else value

    try:
        return json.dumps(changed(json.loads(text))).encode()
    except ValueError:
        lines = (json.loads(line) for line in text.splitlines())
        return b"".join(json.dumps(changed(line)).encode() + b"\n" for line in lines)


def _large(text: bytes, rng: random.Random) -> bytes:
    """Return 5 MB of gzip that unpack to 5 GB, and begin as the text does if that is gzip."""
    part = gzip.compress(bytes(2**26), 9)
    begin = gzip.decompress(text)[:-1] if text[:2] == b"\x1f\x8b" else b"["
    return gzip.compress(begin, 1) + part * 80


def _text(text: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"import os\n", b"version https://git-lfs.github.com/spec/v1\n", b"{}"))


def _cut(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text) + 1)]


def _bytes(text: bytes, rng: random.Random) -> bytes:
    content = bytearray(text)
    for _ in range(rng.choice((1, 8, 64))):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def _deep(text: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"[" * 100_000, b'{"a":' * 100_000, b"a: &a [" * 5_000))


def _bomb(text: bytes, rng: random.Random) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    return "\n".join(lines).encode()


def damaged(path: Path, rng: random.Random) -> str:
    """Damage one file in a random way, and return the name of that way."""
    content = path.read_bytes()
    ways = ("value", "value", "value", "value", "cut", "bytes", "deep", "bomb", "kind")
    way = rng.choice((*ways, "text", "numbers", "large" if path.suffix == ".gz" else "numbers"))
    if way == "kind":
        path.unlink()
        kind = rng.choice(("fifo", "folder", "link", "loop", "empty"))
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("/etc/passwd")
        elif kind == "loop":
            path.symlink_to(path.name)
        else:
            path.touch()
        return kind
    if way in ("value", "numbers"):
        name = path.name
        change = change_json if way == "value" else change_numbers
        if name.endswith((".json.gz",)):
            path.write_bytes(gzip.compress(change(gzip.decompress(content), rng), 1))
        elif (name.endswith(".json") or name in ("stop", "failed")) and content.strip():
            path.write_bytes(change(content, rng))
        elif name.endswith(".jsonl") and content.strip():
            change = change_line if way == "value" else change_numbers
            path.write_bytes(change(content, rng))
        elif name.endswith(".yaml"):
            import yaml

            value = json.dumps(yaml.safe_load(content)).encode()
            path.write_bytes(change(value, rng))
        else:
            path.write_bytes(_bytes(content, rng))
        return way
    made = {"cut": _cut, "bytes": _bytes, "deep": _deep, "bomb": _bomb}
    path.write_bytes((made | {"text": _text, "large": _large})[way](content, rng))
    return way


@dataclass
class Outcome:
    """What a command did with a damaged folder."""

    code: int
    error: str = ""  # the class and message of a refusal, or a traceback
    crashed: bool = False


class _HangError(BaseException):
    pass


def _hang(*_: Any) -> None:
    raise _HangError


def run(arguments: list[str]) -> Outcome:
    """Run a command in this process as `python -m hpctrain` or `python -m data_prep` does."""
    from data_prep.cli import main as data_prep
    from hpctrain.cli import _command
    from hpctrain.errors import HpctrainError

    name, *rest = arguments
    main: Callable[[list[str]], int]
    main = data_prep if name == "data_prep" else partial(_command, name)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    signals = signal.SIGALRM, signal.SIGPROF
    before = [signal.signal(each, _hang) for each in signals]
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            return Outcome(int(main(rest) or 0))
    except HpctrainError as error:
        return Outcome(error.exit_code, f"{type(error).__name__}: {error}")
    except SystemExit as error:
        return Outcome(error.code if isinstance(error.code, int) else 1)
    except _HangError:
        return Outcome(1, f"it hung: {traceback.format_exc()}", crashed=True)
    except BaseException:
        return Outcome(1, traceback.format_exc(), crashed=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def commands(house: Path, damaged_file: Path) -> list[list[str]]:
    """Return the commands that read a file of a house (see `build`)."""
    part, *rest = damaged_file.relative_to(house).parts
    runs, data = str(house / "runs"), str(house / "digits")
    if part == "digits":
        tools = [["data_prep", "inspect", data, "--verify"]]
        where = [f"data.path={data}", f"output_dir={runs}"]
        few = [*where, "parallel.device=cpu", "train.max_steps=2", "tracking.enabled=false"]
        predict = ["predict", str(house / "runs" / "other"), data, str(house / "new")]
        bench = ["bench", "experiment=digits", *few[:3], "--data-only", "--steps", "5"]
        return [*tools, ["data_prep", "inspect", data], ["plan", "experiment=digits", *where],
                predict, bench]  # fmt: skip
    digits = ["plan", "experiment=digits", f"data.path={house / 'digits'}", f"output_dir={runs}"]
    if part == "hardware.yaml":
        return [[*digits, f"hardware={damaged_file}"]]
    if part == "conf":
        own = [f"hydra.searchpath=[{house / 'conf'}]", "hardware=own"]
        return [[*digits, *own]]
    if rest[0] == "doctor":
        return [["doctor", "--history", f"output_dir={runs}"]]
    if rest[0] == "sweeps":
        sweep = str(damaged_file.parent)
        return [["status", runs], ["status", sweep], ["report", sweep], ["cancel", sweep]]
    one, other = str(house / "runs" / rest[0]), str(house / "runs" / "other")
    every = [
        *(["status", runs], ["status", one], ["logs", one], ["cancel", one], ["cancel", "--all"]),
        *(["gc", "--dir", runs, "--delete"], ["report", one]),
        *(["report", runs, "--html", f"{runs}/out.html"], ["report", "--compare", one, other]),
        *(["status", "--live", one, "--once"], ["report", "--plot", one]),
        *(["resume", "--branch", one, "seed=9"], ["status", "--upload", one]),
        *(["evaluate", one], ["export", one, f"{runs}/exported"], ["resume", one]),
    ]
    return every


def cases(
    house: Path, work: Path, rng: random.Random, number: int
) -> Iterator[tuple[str, Outcome]]:
    """Damage a copy of a house `number` times; yield what commands made of it."""
    for n in range(number):
        folder = work / str(n)
        shutil.copytree(house, folder, symlinks=True)
        files = [path for path in folder.rglob("*") if path.is_file() and _READ.search(path.name)]
        path = rng.choice(sorted(path for path in files if "other" not in path.parts))
        way = damaged(path, rng)
        every = commands(folder, path)
        for arguments in rng.sample(every, min(3, len(every))):
            name = f"{path.relative_to(folder)}, {way}: {' '.join(arguments[:3])}"
            with contextlib.chdir(folder):
                yield name, run(arguments)
        shutil.rmtree(folder, ignore_errors=True)
