"""What a sweep on this machine shows while it runs."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from hpctrain.config.schema import Config
from hpctrain.launch import output
from hpctrain.launch.entry import Entry, Status
from hpctrain.launch.local_runs import LocalProgress
from hpctrain.runs.run_dir import RunDir

PROGRESS = {"step": 20, "max_steps": 60, "metric": "val/mse", "metrics": {"val/mse": 0.12345}}


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    """A run that is at step 20."""
    run = RunDir(tmp_path / "digits-00000001")
    run.path.mkdir()
    (run.path / "progress.json").write_text(json.dumps(PROGRESS))
    (run.path / "run.json").write_text(json.dumps({"result": {"val/mse": 0.25}}))
    swept = ["optimizer.lr=0.1"]
    found = Entry([], Config(metric="val/mse"), run, swept=swept)
    found.mark(Status.ENDED, "finished")
    return found


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_has_one_bar_over_the_runs(
    monkeypatch: pytest.MonkeyPatch, entry: Entry, width: int, encoding: str
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(output, "Console", lambda stderr: console)
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True)
    with LocalProgress(4) as progress:
        progress.begin(entry)
        stream.flush()
        drawn = re.sub(r"\x1b\[\S*?[A-Za-z]", "", raw.getvalue().decode(encoding))
        progress.end(entry)
    stream.flush()
    line = drawn.strip().splitlines()[-1]
    assert len(line.rstrip()) <= width
    bar = r"running +0/4 \d:\d\d:\d\d digits-00000001 lr=0.1"  # without colours
    whole = ": step 20/60, val/mse 0.1235"
    shown = re.match(bar, line.strip())
    assert shown, line
    assert whole.startswith(line.strip()[shown.end() :])
    assert line.strip().endswith(whole) == (width == 120)
    ended = r"1 of 4 is finished after \d:\d\d:\d\d: digits-00000001 lr=0.1, val/mse 0.25"
    assert re.search(ended, " ".join(raw.getvalue().decode(encoding).split()))


def test_a_log_has_a_line_at_the_start_and_at_the_end(
    entry: Entry, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalProgress(4) as progress:
        progress.begin(entry)
        progress.look(entry)
        progress.end(entry)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "1 of 4 starts: digits-00000001 lr=0.1"
    assert re.fullmatch(r"1 of 4 is finished after \d:\d\d:\d\d: .* lr=0.1, val/mse 0.25", last)
