"""The bar of a training on narrow and wide terminals, with and without UTF-8, and its log lines."""

import io
import re

import pytest
from rich.console import Console

from hpctrain.engine.parts import display

METRICS = {
    "train/loss": 0.1234,
    "val/mse": 0.5,
    "val/loss": 0.2,
    "val/accuracy": 0.98,
    "perf/samples_per_s": 12345.0,
}


def last_line(monkeypatch: pytest.MonkeyPatch, width: int, encoding: str) -> str:
    """Draw the bar in a terminal with this encoding; return its last state as it arrives there."""
    raw = io.BytesIO()
    # As the command line sets it up: letters that the terminal lacks are written as escapes.
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr("hpctrain.base.terminal.console.Console", lambda stderr: console)
    bar = display._Bar("val/mse")
    bar.start(123456, 198000)
    bar.report(123457, METRICS)
    bar.close()
    stream.flush()
    shown = re.sub(r"\x1b\[\S*?[A-Za-z]", "", raw.getvalue().decode(encoding))
    return shown.strip().splitlines()[-1].rstrip()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize(
    ("width", "last"), [(60, "val mse 0.5"), (90, "val acc 0.98"), (140, "12,345 samples/s")]
)
def test_the_bar_is_one_line_and_has_the_main_metric(
    monkeypatch: pytest.MonkeyPatch, width: int, last: str, encoding: str
) -> None:
    line = last_line(monkeypatch, width, encoding)
    assert len(line) <= width
    assert re.match(r"[━╸-]+\S* +123456/198000 +ETA +\S+ +val mse 0\.5", line), line
    assert line.endswith(last), line
