"""The first ten minutes on one GPU: one command, a table of results, a page of the figures.

    make gpu                                                570 seconds; again: what is left
    python -m tests.gpu.first_minutes --only feed waits     some parts
    python -m tests.gpu.first_minutes --device cpu          what a CPU can rehearse

Each part is a process of its own with a time limit, so that one that hangs or dies takes no other
with it. What shows the most comes first. docs/gpu.md says how to read the table.
"""

import argparse
import compileall
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.gpu.report import Result, Results, commit_of, table

ROOT = Path(__file__).parents[2]
NO_GPU = "no GPU"
CPU_TOO = True  # a CPU can rehearse the part


@dataclass(frozen=True)
class Part:
    """A part of the table, which is killed after `limit_s` seconds; a CPU may rehearse it.

    It takes about `takes_s` seconds, and is not begun if fewer are left.

    The command are arguments of pytest, which begin with a file of tests; or else a module and its
    arguments. The last line that a module prints is JSON, its figures; the line before is the note.
    """

    name: str  # for `--only` and for the file of its output
    shows: str
    command: str
    takes_s: float
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
_SAVES = "tests.benchmarks.test_save_stall --device cuda"
_BENCH = "tests.gpu.bench_gpt2 --json"
_LLAMA = "--model llama3_8b --layers 6 --rows 1 --length 8192 --turns 4 --steps 3"
_INITIAL = "tests/gpu/test_initial_gpu.py"
_FAULTS = "tests/gpu/test_faults_gpu.py"
_TRANSFORMS = "test_feed.py tests/data/test_transforms.py tests/gpu/test_transforms_gpu.py"
_PRECISION = (
    f"{_LOSSES} tests/gpu/test_precision_gpu.py "
    "-k '(precision or fp16 or tf32) and not (checkpointing or compile or offload)'"
)
# In the order of what a minute of them shows.
PARTS = (
    Part("versions", "versions; copies to pinned memory", "tests.gpu.versions", 10, 60, CPU_TOO),
    Part("nvml", "what NVML answers, as a recording", "tests.gpu.nvml_answers", 10, 60),
    Part("waits", "no step waits for the GPU", "tests/gpu/test_no_waits_gpu.py", 40, 120, CPU_TOO),
    Part("losses", "losses are those of the CPU", f"{_RUNS} -k losses_of", 45, 120, CPU_TOO),
    Part(
        "resume", "bitwise; CPU to GPU, and back", f"{_RUNS} -k 'resumed or goes'", 45, 180, CPU_TOO
    ),
    Part("two runs", "saves of two runs", "tests/gpu/test_two_runs_gpu.py", 30, 120, CPU_TOO),
    Part("gpt2", "GPT-2 124M beside a loop by hand", _BENCH, 70, 300),
    Part("llama", "6 layers of Llama 3 8B, 8,192 tokens", f"{_BENCH} {_LLAMA}", 80, 300),
    Part("saves", "the stall of a save of 1.4 GB", f"{_SAVES} --width 1640", 60, 180),
    Part("memory", "peaks beside those of plan", "tests/gpu/test_memory_gpu.py", 30, 120, CPU_TOO),
    Part("attention", "kernels and their memory", "tests/gpu/test_attention_gpu.py", 50, 180),
    Part(
        "offload", "with experts and batch norm, too", f"{_LOSSES} {_INITIAL} -k offload", 50, 180
    ),
    Part("kill", "ranks that are killed go on", f"{_FAULTS} -k killed", 40, 300),
    Part("stop", "gloo: SIGTERM to one of two ranks", f"{_TWO} -k sigterm", 20, 120, CPU_TOO),
    Part("digits", "the host's share of a step", "tests.gpu.bench_digits", 20, 60),
    Part("group", "one rank over NCCL", "tests/gpu/test_group_gpu.py", 15, 60, CPU_TOO),
    Part("initial", "initial values; repeated runs", f"{_INITIAL} -k 'not offload'", 60, 180),
    Part("transforms", "batches are those of the CPU", f"tests/data/{_TRANSFORMS} -m gpu", 30, 120),
    Part("feed", "sums behind slow streams", "tests/gpu/test_feed_gpu.py", 30, 120, CPU_TOO),
    Part("qlora", "4 bits as rounded weights", "tests/gpu/test_qlora_gpu.py", 20, 120, CPU_TOO),
    Part("hang", "a kernel that does not end is named", f"{_FAULTS} -k kernel", 60, 180),
    Part("restart", "compiled code is found again", "tests/gpu/test_restart_gpu.py", 60, 240),
    Part("precision", "losses by precision", _PRECISION, 60, 180),
    Part(
        "compile", "checkpointing x compile", f"{_LOSSES} -k 'checkpointing or compile'", 120, 300
    ),
    Part("micro-batches", "the size that fits", f"{_LOSSES} -k 'auto or accumulate'", 30, 120),
    Part(
        "fp8",
        "losses of fp8",
        f"tests/gpu/test_float8_gpu.py {_LOSSES} -k 'float8 or fp8'",
        60,
        180,
    ),
    Part(
        "experts", "grouped products are those of a loop", "tests/gpu/test_experts_gpu.py", 15, 60
    ),
    Part("two ranks", "gloo: ddp and compressions", f"{_TWO} -k ddp", 120, 300, CPU_TOO),
)


def run(part: Part, folder: Path, device: str, gpu: bool, left_s: float) -> Result:
    """Run a part, and keep its output as NAME.log in `folder`; the device "cpu" rehearses it.

    It is killed after its limit, or `left_s` seconds.
    """
    if part.missing:
        return Result(part.name, "missing", note=", ".join(part.missing))
    if (device == "cuda" and not gpu) or (device == "cpu" and not part.on_cpu):
        return Result(part.name, "skipped", note=NO_GPU)
    if left_s < part.takes_s:
        note = f"it takes about {part.takes_s:g} s, and {max(0.0, left_s):.0f} s are left"
        return Result(part.name, "skipped", note=note)
    limit_s = min(part.limit_s, left_s)
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
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    seconds = round(time.monotonic() - begun, 1)
    if code is None:
        return Result(part.name, "timeout", seconds, f"killed after {limit_s:.3g} s ({log})")
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
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(f"  {part.name:<14} {part.shows}" for part in parts),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses")
    names = [part.name for part in parts]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--budget", type=float, default=math.inf, metavar="S", help="all seconds")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what has passed with this commit and GPU"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="a folder")
    return parser.parse_args(given)


def compile_bytecode() -> None:
    """Compile torch and this repository, which each part would do again if nothing is kept."""
    found = importlib.util.find_spec("torch")
    folders = [*(found.submodule_search_locations or ())] if found else []
    for folder in (*folders, ROOT / "hpctrain", ROOT / "tests"):
        compileall.compile_dir(folder, quiet=2, workers=0)


def main(given: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts; print the table, and write `tests.gpu.report` and the output of each part.

    The exit code is 0 if no part has failed and at least one has passed; otherwise 1.
    """
    asked, begun = arguments(parts, given), time.monotonic()
    chosen = [part for part in parts if asked.only is None or part.name in asked.only]
    asked.out.mkdir(parents=True, exist_ok=True)
    compile_bytecode()
    known, commit = versions(), commit_of(ROOT)
    gpu = known.get("gpu") or "no GPU" if asked.device == "cuda" else "cpu"
    console = Console(width=None if sys.stdout.isatty() else 120)
    report, results = Results(asked.out), list[Result]()
    shows = {part.name: part.shows for part in parts}
    known_of = {part.name: report.kept.get((part.name, commit, gpu)) for part in chosen}
    if asked.resume:  # one that has hung shall not take the time of the others once more
        chosen.sort(key=lambda part: getattr(known_of[part.name], "state", "") == "timeout")
    for part in chosen:
        before = known_of[part.name]
        if asked.resume and before is not None and before.state == "passed":
            results.append(before)
            continue
        console.print(f"{part.name}: {part.shows} ...", highlight=False)
        left_s = asked.budget - (time.monotonic() - begun)
        result = run(part, asked.out, asked.device, bool(known.get("gpu")), left_s)
        result.gpu, result.commit = gpu, commit
        result.time = datetime.now(UTC).isoformat(timespec="seconds")
        results.append(result)
        if result.state != "skipped" or before is None:
            report.add(result, known, shows)
    console.print(table(results, shows))
    console.print(f"figures and versions: {asked.out}/report.md", soft_wrap=True, highlight=False)
    if all(result.state == "skipped" for result in results):
        why = known.get("no_gpu") or "torch sees no GPU"
        console.print(f"no part has run: {why}. --device cpu rehearses", highlight=False)
        return 1
    return int(any(result.is_bad for result in results))


if __name__ == "__main__":
    sys.exit(main())
