"""Tables fit into every terminal from 60 columns on, and break no word, name or number."""

import io
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from hpctrain.commands import status
from hpctrain.console import Cell, Console, Table, shortened, wrapped
from hpctrain.report import report_command
from tests.report.accounts import attempt, spent, write_run

LONG = "an-experiment-with-a-long-name-that-says-everything-0123abcd"


class Terminal(io.StringIO):
    """A terminal; its width is the variable COLUMNS."""

    def isatty(self) -> bool:
        return True


def drawn(*objects: object, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(*objects)
    return capture.get().splitlines()


def table(**options: object) -> Table:
    found = Table("run", "state", "empty", "time", "step", "metric", "text", **options)  # type: ignore[arg-type]
    texts = ("a sentence of words " * 8, "漢字" * 30, "/a/path/" + "x" * 90, "", "short")
    for number, text in enumerate(texts):
        name = Cell(LONG if number == 2 else f"digits-{number:08x}", no_wrap=True)
        times = ("3 h 20 min", f"{10**number}/123456", f"val/loss {1.2345e-5 * number:.4g}")
        found.add_row(name, Cell("failed", "red"), "", *times, text)
    return found


def words(lines: list[str]) -> set[str]:
    return {word for line in lines for word in line.split() if not cell_len(word) > len(word)}


def test_no_word_is_broken_in_any_terminal() -> None:
    whole = drawn(table(right=(3,)), width=100_000)
    assert len(whole) == 6  # in a pipe a row is a line
    assert "empty" not in whole[0]
    for width in range(60, 201, 4):
        lines = drawn(table(right=(3,)), width=width)
        assert words(lines) == words(whole)  # nothing is lost, and nothing is cut
        stand_out = {line.strip() for line in lines if cell_len(line) > width}
        assert stand_out <= {next(word for word in words(whole) if word.startswith("/a/path"))}
        assert sum("3 h 20 min" in line for line in lines) == 5
        # In this order the columns of the least worth are left out.
        lines = drawn(table(first_out=(6, 4, 5)), width=width)
        assert len(lines) <= 7 or width > 120
        assert ("step" in lines[0]) <= ("metric" in lines[0])
        assert all("state" in lines[0] and "time" in lines[0] for _ in lines)


def test_rows_are_told_apart_in_each_part_and_short_names_stay_beside_their_text() -> None:
    found = Table("layout", "ranks", *("a long heading " * 2 for _ in range(5)), keys=2)
    for ranks in ("8", "16"):
        found.add_row("zero1", ranks, *("1,234,567 GPU-hours now" for _ in range(5)))
    lines = drawn(found, width=60)
    assert sum(line.split()[:2] == ["zero1", "16"] for line in lines) == 5
    for number in ("      7", "attempt 10"):
        log = Table("", "")
        log.add_row(number, "in /a/" + "b" * 90)
        log.add_row(number, "^" * 70)
        assert all(line.startswith((number, " ")) for line in drawn(log, width=80))
        assert sum(line.startswith(number + "  ") for line in drawn(log, width=80)) == 2


def test_sentences_are_folded_between_words() -> None:
    path = "/a/" + "b" * 80
    text = f"A sentence with {path} and 1,234,567 words {'ä' * 20} [bold]x[/bold] " * 3
    for width in (60, 80):
        for shown in (text, Group(Text(text)), Cell(text, no_wrap=False)):
            lines = drawn(shown, width=width)
            assert [word for line in lines for word in line.split()] == text.split()
            assert all(len(line) <= width or line.strip() == path for line in lines)
        assert [str(line) for line in wrapped(Text("a\n\n  b c"), 3)] == ["a", "", "  b", "c"]
    assert drawn(text, width=10_000) == [text.rstrip()]
    assert shortened("one two three", 13) == "one two three"
    assert shortened("one two three", 12) == "one two ..."
    assert cell_len(shortened("漢字" * 30, 21)) <= 21


def test_what_looks_wrong_with_a_finished_run_is_not_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = {"topic": "stuck", "text": "train/loss has not fallen", "step": 2, "about": ""}
    write_run(tmp_path / "dead", [attempt(0, 9)], notes=[note])
    monkeypatch.setenv("PATH", str(tmp_path))  # without the scheduler
    colours = {"TERM": "xterm-256color", "COLORTERM": "", "FORCE_COLOR": "1", "COLUMNS": "200"}
    for name, value in colours.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    status.main(["--dir", str(tmp_path)])
    line = terminal.getvalue().splitlines()[-1]
    assert "\x1b[33mdead: train/loss has not fallen" in line


def test_a_report_breaks_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "ValueError: of 漢字 " + "many words " * 40
    for number, name in enumerate(("digits-00000001", LONG)):
        write_run(
            tmp_path / name,
            [attempt(0, 100, state="failed", error=reason)],
            [spent(1, 90, 20, startup=10, compute=80)],
            state="failed",
            swept=["optimizer.lr=0.001", f"seed={number}"],
        )
    for name, value in {"TERM": "dumb", "LINES": "50"}.items():
        monkeypatch.setenv(name, value)

    def shown(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        report_command.main(["--dir", str(tmp_path)])
        return terminal.getvalue().splitlines()

    whole = words(shown(5_000))
    for width in (60, 80, 132, 200):
        lines = shown(width)
        assert words(lines) == whole
        assert [line for line in lines if cell_len(line) > width] == []
