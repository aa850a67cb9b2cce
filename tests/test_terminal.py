"""Text of strangers never commands the terminal: in run directories, logs, archives and configs."""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import tarfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from rich.table import Table

from hpctrain.base.secrets import mask_logging
from hpctrain.base.terminal.console import Cell, Console
from hpctrain.base.terminal.terminal import Guard, harmless, indented, printable
from tests import forkserver

# Write the clipboard (OSC 52), clear the screen, set the title, ring, hide, go back, reverse.
EVIL = "\x1b]52;c;agk=\x07\x1b[2J\x1b]0;title\x1b\\\x07\x9b8m\r\x08\u202e\u2066x"
SEEN = r"\x1b]52;c;agk="  # in lower case, as field names are
MARKUP = "[bold]y[/bold] [/nope] [link=http://evil]z[/link] :skull:"
# ESC [ … m is our own colour. Newlines and tabs are text.
COMMAND = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain: äß 漢字 🙂 tab\tand\nline", r"plain: äß 漢字 🙂 tab\tand\nline"),
        (
            "\x00\x07\x08\x0b\x0c\r\x1b\x7f\x80\x9b\x9f",
            r"\x00\x07\x08\x0b\x0c\r\x1b\x7f\x80\x9b\x9f",
        ),
        (
            "\u061c\u200e\u200f\u202a\u202e\u2066\u2069",
            r"\u061c\u200e\u200f\u202a\u202e\u2066\u2069",
        ),
        ("\u2028\u2029\udcff", r"\u2028\u2029\udcff"),
    ],
)
def test_control_characters_are_seen(text: str, line: str) -> None:
    assert printable(text) == line
    assert harmless(text) == line.replace(r"\t", "\t").replace(r"\n", "\n")
    assert printable(line) == harmless(line) == line  # what is harmless stays as it is


def test_a_quoted_newline_begins_no_message() -> None:
    assert indented("bad value a\nerror: \x1b[8mall is well") == (
        "bad value a\n  error: \\x1b[8mall is well"
    )


def test_rich_shows_no_command_and_reads_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Guard(stream))
    table = Table("name", EVIL, title=MARKUP)
    table.add_row(Cell(EVIL), f"{EVIL}{MARKUP}", style="red")
    console = Console(width=400, force_terminal=True)
    console.print(table, EVIL, MARKUP)
    print(EVIL, MARKUP)
    found = stream.getvalue()
    assert COLOUR.search(found)  # rich's own commands go to the stream
    plain = COLOUR.sub("", found)
    assert not COMMAND.search(plain)
    assert plain.count(SEEN) == 5
    assert plain.count(MARKUP) == 3  # a cell that is a plain str is cut at its width
    assert printable(EVIL) in plain.splitlines()[4]  # a cell is whole


def test_log_lines_have_no_command() -> None:
    root = logging.getLogger()
    stream = io.StringIO()
    handler, before = logging.StreamHandler(stream), root.handlers[:]
    root.handlers[:] = [handler]
    try:
        mask_logging()
        logging.getLogger("some").warning("shard %s", EVIL)
    finally:
        root.handlers[:] = before
    assert SEEN in stream.getvalue()
    assert not COMMAND.search(stream.getvalue())


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder of runs in which another user has put hostile names, reasons and logs."""
    run = tmp_path / "runs" / f"{EVIL}\nfinished-00000009"
    (run / "logs").mkdir(parents=True)
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "config.yaml").touch()
    attempt = {
        "started": 1.0,
        "launcher": "slurm",
        "job_id": "7_0",
        "host": EVIL,
        "error": f"{MARKUP} {EVIL}\nall is well",
    }
    record = {"state": "failed", "attempts": [attempt], "swept": [f"a={EVIL}"]}
    (run / "run.json").write_text(json.dumps(record))
    (run / "progress.json").write_text(json.dumps({"metric": EVIL, "metrics": {EVIL: 1.0}}))
    (run / "logs" / "7_0.rank0.log").write_text(f"{EVIL}\nError: {EVIL} {MARKUP}\n")
    (tmp_path / "runs" / f".gc-{EVIL}").mkdir()  # what a gc that was killed has left
    return tmp_path / "runs"


def shown(*arguments: str, cwd: Path) -> str:
    """Return what `python -m ARGUMENTS` prints into pipes, which may end in a terminal."""
    command = [sys.executable, "-m", *arguments]
    done = forkserver.run(command, capture_output=True, timeout=120, cwd=cwd, check=False)
    return (done.stdout + done.stderr).decode(errors="surrogateescape")


def shown_on_terminal(*arguments: str) -> str:
    """Return what `python -m ARGUMENTS` prints on a terminal."""
    ours, its = pty.openpty()
    read = bytearray()

    def reader() -> None:
        with suppress(OSError):  # the other end is closed
            while block := os.read(ours, 1 << 16):
                read.extend(block)

    thread = threading.Thread(target=reader)
    thread.start()
    command, env = [sys.executable, "-m", *arguments], os.environ | {"COLUMNS": "300"}
    subprocess.run(command, stdin=its, stdout=its, stderr=its, env=env, check=False)
    os.close(its)
    thread.join()
    os.close(ours)
    return read.decode(errors="surrogateescape").replace("\r\n", "\n")


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["logs", "\x1b"],
        ["gc"],
        ["cancel", "\x1b"],
        ["status", f"no{EVIL}"],  # an error of ours
        ["logs", "--lines", EVIL],  # an error of argparse
    ],
)
def test_commands_on_planted_runs(planted: Path, command: list[str]) -> None:
    found = shown("hpctrain", *command, "--dir", str(planted), cwd=planted.parent)
    assert SEEN in found
    assert not COMMAND.search(found)
    # A newline in a name begins no line that looks like a message about another run.
    assert "\nfinished-" not in found


def test_an_error_before_any_command(tmp_path: Path) -> None:
    found = shown("hpctrain", "no\x1b[2J\nerror: x", cwd=tmp_path)
    assert found.startswith("error: no\\x1b[2J\n  error: x: no such command")
    assert not COMMAND.search(found)


def test_logs_are_exact_in_a_file_and_harmless_on_a_terminal(planted: Path) -> None:
    (run,) = planted.glob("*finished*")
    content = f"\x1b[32mgreen\x1b[0m\tä {EVIL}\r\n10%\r20%\r\n".encode() + b"\xff\xfe no end"
    (run / "logs" / "7_0.rank0.log").write_bytes(b"before\n" + content)
    arguments = ["logs", "\x1b", "--rank", "0", "--dir", str(planted)]
    command = [sys.executable, "-m", "hpctrain", *arguments]
    done = forkserver.run([*command, "--lines", "99"], capture_output=True, check=True)
    assert done.stdout == b"before\n" + content
    # The carriage return in EVIL ends a line, too.
    done = forkserver.run([*command, "--lines", "5"], capture_output=True, check=True)
    assert done.stdout == content
    found = shown_on_terminal("hpctrain", *arguments)
    assert f"green\tä {SEEN}" in found
    assert "\n10%\n20%\n\ufffd\ufffd no end" in found
    assert not COMMAND.search(found)


def test_members_of_foreign_archives(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in (f"a.{EVIL}", f"b.{EVIL}\ndata_prep: all is well"):
            tar.addfile(tarfile.TarInfo(name))
    found = shown("data_prep", "webdataset", "a.tar", "OUT", cwd=tmp_path)
    assert SEEN in found
    assert not COMMAND.search(found)
    assert "\ndata_prep: all is well" not in found
