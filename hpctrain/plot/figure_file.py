"""The curves of runs as a PNG picture, or as an HTML page that needs no other files."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.disk import temporary
from hpctrain.errors import ConfigError, StorageError
from hpctrain.plot.curves import Curve, RunCurves, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT, _DPI = 11.0, 2.6, 120  # inches, and dots per inch
_MOST_SYSTEM = 12


def check(file: Path) -> None:
    """Check that the file can be made, before runs are read.

    Raises:
        ConfigError: It has another ending, or matplotlib is not installed.
    """
    if file.suffix.lower() not in (".png", ".html"):
        raise ConfigError(f"--out {file}: a plot is a .png or a .html file")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--out needs the package matplotlib: pip install 'hpctrain[prep]'; without --out the "
            "plot is drawn in the terminal"
        ) from error


def write(
    file: Path,
    runs: Sequence[RunCurves],
    metrics: Sequence[str],
    smooth: float,
    log_x: bool,
    log_y: bool,
) -> None:
    """Write the picture or the page; an existing file is replaced.

    Args:
        file: A `.png` or a `.html` file.
        runs: The runs.
        metrics: The metrics over the steps, one plot for each.
        smooth: The weight of the average; then the values themselves are drawn faintly.
        log_x: Whether the steps have a logarithmic axis.
        log_y: Whether the metrics have one.

    Raises:
        StorageError: The file cannot be written.
    """
    picture = _png(runs, metrics, smooth, log_x, log_y)
    content = picture
    if file.suffix.lower() == ".html":
        title = html.escape(", ".join(run.name for run in runs))
        source = base64.b64encode(picture).decode()
        content = (
            f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
            f'<img alt="curves" style="max-width:100%" src="data:image/png;base64,{source}">\n'
        ).encode()
    unfinished = temporary(file)
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise StorageError(f"--out {file}: cannot be written ({error.strerror})") from error


def _png(
    runs: Sequence[RunCurves], metrics: Sequence[str], smooth: float, log_x: bool, log_y: bool
) -> bytes:
    from matplotlib.figure import Figure

    system = list(dict.fromkeys(name for run in runs for name in run.system))[:_MOST_SYSTEM]
    count = len(metrics) + len(system)
    figure = Figure(figsize=(_WIDTH, _HEIGHT * count), layout="constrained")
    axes = figure.subplots(count, 1, squeeze=False)[:, 0]
    for part, name in zip(axes, metrics, strict=False):
        for number, run in enumerate(runs):
            if (curve := run.metrics.get(name)) is not None:
                _line(part, curve, run.name, number, smooth)
                for step in run.restarts:
                    part.axvline(step, color=f"C{number}", linestyle=":", linewidth=1)
        part.set_title(name, loc="left", fontsize="medium")
        part.set(xlabel="step", xscale="log" if log_x else "linear")
        part.set_yscale("log" if log_y else "linear", **({"nonpositive": "mask"} if log_y else {}))
        part.grid(alpha=0.3)
    for part, name in zip(axes[len(metrics) :], system, strict=False):
        for number, run in enumerate(runs):
            if (curve := run.system.get(name)) is not None:
                _line(part, curve, run.name, number, 0.0)
        part.set_title(f"system/{name}", loc="left", fontsize="medium")
        part.set(xlabel="hours")
        part.grid(alpha=0.3)
    axes[0].legend(loc="best", fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return content.getvalue()


def _line(part: Axes, curve: Curve, name: str, number: int, smooth: float) -> None:
    # matplotlib leaves out labels with this first letter.
    label, colour = name.lstrip("_").replace("$", r"\$"), f"C{number}"
    marker = "." if len(curve.x) < 50 else ""
    if smooth:
        part.plot(curve.x, curve.y, color=colour, alpha=0.25, linewidth=0.8)
        marker = ""
    shown = smoothed(curve, smooth)
    part.plot(shown.x, shown.y, color=colour, label=label, marker=marker, linewidth=1.3)
