"""The first ten minutes on one GPU: one command, a table of results, a file of the figures.

    make gpu                                                all parts, on a GPU
    python -m tests.gpu.first_minutes --only feed waits     some parts
    python -m tests.gpu.first_minutes --device cpu          what a CPU can rehearse

Each part is a process of its own with a time limit, so that one that hangs or dies takes no other
with it. docs/gpu.md says how to read the table.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).parents[2]
NO_GPU = "no GPU"
CPU_TOO = True  # a CPU can rehearse the part


@dataclass(frozen=True)
class Part:
    """A part of the table, which is killed after `limit_s` seconds; a CPU may rehearse it.

    The command are arguments of pytest, which begin with a file of tests; or else a module and its
    arguments. The last line that a module prints is JSON, its figures; the line before is the note.
    """

    name: str  # for `--only` and for the file of its output
    shows: str
    command: str
    limit_s: float
    on_cpu: bool = False

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)

    @property
    def is_module(self) -> bool:
        """Whether the command is a module."""
        return not self.words[0].endswith(".py")

    @property
    def missing(self) -> list[str]:
        """The files of the command that are not there."""
        files = [word for word in self.words if word.endswith(".py")]
        if self.is_module:
            files = [self.words[0].replace(".", "/") + ".py"]
        return [file for file in files if not (ROOT / file).exists()]


_LOSSES = "tests/gpu/test_parallel_gpu.py"
_RUNS = "tests/gpu/test_gpu.py"
_TWO = "tests/gpu/test_two_ranks_gpu.py"
_SAVES = "tests.benchmarks.test_save_stall"
_INITIAL = "tests/gpu/test_initial_gpu.py"
_TRANSFORMS = "test_feed.py tests/data/test_transforms.py tests/gpu/test_transforms_gpu.py"
_PRECISION = (
    f"{_LOSSES} tests/gpu/test_precision_gpu.py "
    "-k '(precision or fp16 or tf32) and not (checkpointing or compile or offload)'"
)
# The first ones come first because the others stand on them.
PARTS = (
    Part("versions", "driver, CUDA, NCCL, cuDNN, GPU, torch", "tests.gpu.versions", 60, CPU_TOO),
    Part("group", "one rank over NCCL begins and ends", "tests/gpu/test_group_gpu.py", 60, CPU_TOO),
    Part("waits", "no step waits for the GPU", "tests/gpu/test_no_waits_gpu.py", 120, CPU_TOO),
    Part("initial", "initial values; repeated runs", f"{_INITIAL} -k 'not offload'", 180),
    Part("losses", "losses are those of the CPU", f"{_RUNS} -k losses_of", 120, CPU_TOO),
    Part("transforms", "batches are those of the CPU", f"tests/data/{_TRANSFORMS} -m gpu", 120),
    Part("feed", "checksums behind slow streams", "tests/gpu/test_feed_gpu.py", 120, CPU_TOO),
    Part("precision", "losses by precision", _PRECISION, 180),
    Part("compile", "checkpointing x compile", f"{_LOSSES} -k 'checkpointing or compile'", 300),
    Part("micro-batches", "the size that fits is found", f"{_LOSSES} -k 'auto or accumulate'", 120),
    Part("offload", "with experts and batch norm, too", f"{_LOSSES} {_INITIAL} -k offload", 180),
    Part("fp8", "losses of fp8", f"tests/gpu/test_float8_gpu.py {_LOSSES} -k 'float8 or fp8'", 180),
    Part("attention", "kernels and their memory", "tests/gpu/test_attention_gpu.py", 180),
    Part("experts", "grouped products are those of a loop", "tests/gpu/test_experts_gpu.py", 60),
    Part("resume", "dropout; CPU to GPU, and back", f"{_RUNS} -k 'resumed or goes'", 180, CPU_TOO),
    Part("two ranks", "gloo: ddp and compressions", f"{_TWO} -k ddp", 300, CPU_TOO),
    Part("stop", "gloo: SIGTERM to one of two ranks", f"{_TWO} -k sigterm", 120, CPU_TOO),
    Part("saves", "the stall of a save in the background", f"{_SAVES} --device cuda", 120),
    Part("gpt2", "GPT-2 124M beside a loop by hand", "tests.gpu.bench_gpt2 --json", 300),
)
# What one GPU cannot show; the table says so.
TWO_GPUS = (
    "NCCL's destroy after an exception on one rank",
    "GPUs of Slurm's tasks (cgroups), and one GPU for each of several ranks",
    "FSDP, TP, PP and EP over NCCL",
)


@dataclass
class Result:
    """How a part ended."""

    name: str
    state: str  # passed, failed, timeout, missing (a file of the part is not there) or skipped
    seconds: float = 0.0
    note: str = ""  # why it did not pass, or a figure in words
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        """Whether the command must fail because of this part."""
        return self.state in ("failed", "timeout", "missing")


def run(part: Part, folder: Path, device: str, gpu: bool) -> Result:
    """Run a part, and keep its output as NAME.log in `folder`; the device "cpu" rehearses it."""
    if part.missing:
        return Result(part.name, "missing", note=", ".join(part.missing))
    if (device == "cuda" and not gpu) or (device == "cpu" and not part.on_cpu):
        return Result(part.name, "skipped", note=NO_GPU)
    log = folder / f"{part.name.replace(' ', '-')}.log"
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    tests = ["pytest", "--all", "-p", "no:cacheprovider", f"--junitxml={report}"]
    tests += ["-o", "junit_family=xunit1"]  # the other family has no figures
    command = [sys.executable, "-m", *([] if part.is_module else tests), *part.words]
    begun = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HPCTRAIN_GPU_TESTS": device, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # a process group of its own ends with the part
        )
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    seconds = round(time.monotonic() - begun, 1)
    if code is None:
        return Result(part.name, "timeout", seconds, f"killed after {part.limit_s:g} s ({log})")
    found = of_module(code, log) if part.is_module else of_tests(code, report)
    if found.state == "failed":
        found.note = f"{found.note} ({log})"
    found.name, found.seconds = part.name, seconds
    return found


def end(process: "subprocess.Popen[Any]") -> None:
    """Kill a process, its group, and the processes below it: torchrun gives ranks other groups."""
    below = descendants(process.pid)
    for kill, number in ((os.killpg, process.pid), *((os.kill, pid) for pid in below)):
        with suppress(ProcessLookupError):
            kill(number, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    found: list[int] = []
    with suppress(OSError):  # the process has ended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def of_module(code: int, log: Path) -> Result:
    """Return the result of a module that has ended with `code`."""
    *_, note, last = ["", "", *log.read_text(errors="replace").strip().splitlines()]
    if code:
        return Result("", "failed", note=last or f"exit code {code}")
    try:
        figures: dict[str, Any] = json.loads(last)
    except ValueError:
        return Result("", "failed", note="its last line is not JSON")
    return Result("", "passed", note=note, figures=figures)


def of_tests(code: int, report: Path) -> Result:
    """Return the result of tests, from what pytest has written."""
    if not report.exists():
        return Result("", "failed", note=f"pytest has ended with {code} before a test")
    cases = list(ElementTree.parse(report).iter("testcase"))
    figures = {
        f"{found.get('name')}": _number(found.get("value", ""))
        for case in cases
        for found in case.iter("property")
    }
    bad = [case for case in cases if any(child.tag in ("failure", "error") for child in case)]
    skips = [skip for case in cases if (skip := case.find("skipped")) is not None]
    passed = len(cases) - len(bad) - len(skips)
    if bad:
        names = ", ".join(str(case.get("name")) for case in bad[:2])
        more = f" and {len(bad) - 2} more" if len(bad) > 2 else ""
        note = f"{len(bad)} of {len(cases)}: {names}{more}"
        return Result("", "failed", note=note, figures=figures)
    if code not in (0, 5) or not cases:
        note = "no test was found" if not cases else f"pytest has ended with {code}"
        return Result("", "failed", note=note)
    if not passed:
        why = str(skips[0].get("message"))
        return Result("", "skipped", note=NO_GPU if "sees no CUDA" in why else why)
    left = f", {len(skips)} skipped" if skips else ""
    return Result("", "passed", note=f"{passed} passed{left}", figures=figures)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def table(parts: Iterable[Part], results: Sequence[Result]) -> Table:
    """Return the table of the results, and of what waits for two GPUs."""
    made = Table(title="The first minutes on a GPU", title_justify="left")
    for name in ("part", "result", "seconds", "shows", "note"):
        made.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    shows = {part.name: part.shows for part in parts}
    for result in results:
        style = "red" if result.is_bad else "green" if result.state == "passed" else "yellow"
        seconds = f"{result.seconds:.1f}" if result.seconds else ""
        state = Text(result.state, style=style)
        made.add_row(result.name, state, seconds, shows[result.name], Text(result.note))
    for what in TWO_GPUS:
        made.add_row("", Text("waits", style="yellow"), "", what, "needs two GPUs")
    return made


def versions() -> dict[str, Any]:
    """Return the versions by name, from a process of its own; empty if that fails."""
    command = [sys.executable, "-m", "tests.gpu.versions"]
    options: Any = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120}
    try:
        done = subprocess.run(command, check=True, **options)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return found


def arguments(parts: Sequence[Part], given: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; an unknown part ends the process with an error that lists all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses")
    names = [part.name for part in parts]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="a folder")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts; print the table, and write OUT/report.json and the output of each part.

    The exit code is 0 if no part has failed and at least one has run; otherwise 1.
    """
    asked = arguments(parts, given)
    chosen = [part for part in parts if asked.only is None or part.name in asked.only]
    asked.out.mkdir(parents=True, exist_ok=True)
    known = versions()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: list[Result] = []
    report = asked.out / "report.json"
    for part in chosen:
        console.print(f"{part.name}: {part.shows} ...", highlight=False)
        results.append(run(part, asked.out, asked.device, gpu=bool(known.get("gpu"))))
        facts = {  # written after each part, so that Ctrl-C loses none
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": asked.device,
            "versions": known,
            "parts": [asdict(result) for result in results],
            "needs_two_gpus": list(TWO_GPUS),
        }
        report.write_text(json.dumps(facts, indent=1) + "\n")
    console.print(table(chosen, results))
    console.print(f"figures and versions: {report}", soft_wrap=True, highlight=False)
    if all(result.state == "skipped" for result in results):
        why = known.get("no_gpu") or "torch sees no GPU"
        console.print(f"no part has run: {why}. --device cpu rehearses", highlight=False)
        return 1
    return int(any(result.is_bad for result in results))


if __name__ == "__main__":
    sys.exit(main())
