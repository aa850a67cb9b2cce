"""The results of `make gpu`: kept by part, commit and GPU, so that a later call loses none.

OUT/report.json     all results
OUT/report.md       a page for each commit and GPU, the newest first
"""

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

# What one GPU cannot show; the table says so.
TWO_GPUS = (
    "NCCL's destroy after an exception on one rank",
    "GPUs of Slurm's tasks (cgroups), and one GPU for each of several ranks",
    "FSDP, TP, PP and EP over NCCL",
)


@dataclass
class Result:
    """How a part ended, on which GPU ("cpu" in a rehearsal) and with which commit."""

    name: str
    state: str  # passed, failed, timeout, missing (a file of the part is not there) or skipped
    seconds: float = 0.0
    note: str = ""  # why it did not pass, or a figure in words
    figures: dict[str, Any] = field(default_factory=dict)
    gpu: str = ""
    commit: str = ""
    time: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether the command must fail because of this part."""
        return self.state in ("failed", "timeout", "missing")

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later result of the same key takes the place of."""
        return self.name, self.commit, self.gpu


class Results:
    """The results that a folder has, and those of this call."""

    def __init__(self, folder: Path) -> None:
        self._folder, known = folder, {each.name for each in fields(Result)}
        self.kept: dict[tuple[str, str, str], Result] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):  # there is none, or an older one
            for part in json.loads((folder / "report.json").read_text())["parts"]:
                own = Result(**{name: value for name, value in part.items() if name in known})
                self.kept[own.key] = own

    def add(self, result: Result, versions: Mapping[str, Any], shows: Mapping[str, str]) -> None:
        """Keep a result, and write both files, so that Ctrl-C loses none."""
        self.kept.pop(result.key, None)
        self.kept[result.key] = result
        facts = {
            "versions": versions,
            "parts": [asdict(each) for each in self.kept.values()],
            "needs_two_gpus": list(TWO_GPUS),
        }
        (self._folder / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
        text = "\n".join(_page([*self.kept.values()], shows)) + "\n"
        (self._folder / "report.md").write_text(text)


def _page(results: Sequence[Result], shows: Mapping[str, str]) -> Iterator[str]:
    yield "# What one GPU has shown"
    for commit, gpu in dict.fromkeys((each.commit, each.gpu) for each in reversed(results)):
        own = [each for each in results if (each.commit, each.gpu) == (commit, gpu)]
        yield f"\n## {gpu}, commit {commit}\n"
        yield "| part | result | seconds | shows | note |"
        yield "| --- | --- | --- | --- | --- |"
        for each in own:
            note = each.note.replace("|", "\\|")
            said = shows.get(each.name, "")
            yield f"| {each.name} | {each.state} | {each.seconds:g} | {said} | {note} |"
        figures = [(each.name, *pair) for each in own for pair in _flat(each.figures)]
        if figures:
            yield "\n| part | figure | value |"
            yield "| --- | --- | --- |"
        for name, figure, value in figures:
            shown = f"{value:.6g}" if isinstance(value, float) else value
            yield f"| {name} | {figure} | {shown} |"


def _flat(figures: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}: ")
        else:
            yield f"{before}{name}", value


def commit_of(root: Path) -> str:
    """Return the commit of a folder, with a + if files have changed since; "" without git."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain"))
    return ""


def table(results: Iterable[Result], shows: Mapping[str, str]) -> Table:
    """Return the table of the results, and of what waits for two GPUs."""
    made = Table(title="The first minutes on a GPU", title_justify="left")
    for name in ("part", "result", "seconds", "shows", "note"):
        made.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for result in results:
        style = "red" if result.is_bad else "green" if result.state == "passed" else "yellow"
        seconds = f"{result.seconds:.1f}" if result.seconds else ""
        state = Text(result.state, style=style)
        made.add_row(result.name, state, seconds, shows[result.name], Text(result.note))
    for what in TWO_GPUS:
        made.add_row("", Text("waits", style="yellow"), "", what, "needs two GPUs")
    return made
