"""The bar of a training on narrow and wide terminals."""

import io
import re

import pytest
from rich.console import Console

from hpctrain.train import display


@pytest.mark.parametrize(("width", "whole"), [(60, False), (80, False), (140, True)])
def test_bar_count_and_eta_fit_and_only_the_metrics_are_cut(
    monkeypatch: pytest.MonkeyPatch, width: int, whole: bool
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(display, "Console", lambda stderr: console)
    bar = display.Bar()
    bar.start(123456, 198000)
    metrics = {"train/loss": 0.1234, "val/loss": 0.2, "val/accuracy": 0.98}
    bar.report(123457, metrics | {"perf/samples_per_s": 12345.0})
    bar.close()
    line = re.sub(r"\x1b\[\S*?[A-Za-z]", "", shown.getvalue()).strip().splitlines()[-1].strip()
    assert len(line) <= width
    assert re.match(r"━+\S* +123456/198000 +0:00:00 +ETA +\S+ +loss 0\.1234", line), line
    assert line.endswith("12,345 samples/s") == whole
