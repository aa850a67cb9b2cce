"""Histograms of gradients and parameters, every `train.histograms_every` steps.

    values of a rank's part ── counts by sign and power of two ── added over the ranks ── rank 0
        artifacts/histograms/step-00000100.json     a row of counts for each parameter
        histograms/gradients, histograms/weights    a picture for each, in MLflow

A bin is a power of two, with its sign. So the bins are known before the values are, a value falls
into the same bin in every layout, and one reduction adds the counts of all parameters. Each element
of the model is counted once, however the ranks divide or repeat it.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.disk import write_atomically
from hpctrain.distributed import objects
from hpctrain.distributed.tensors import local
from hpctrain.parallel.reducing.scalars import Scalar
from hpctrain.parallel.wrappers.parallel_model import ParallelModel, copies
from hpctrain.step_names import step_name
from hpctrain.tracking.tracker import NullTracker, Tracker

log = logging.getLogger(__name__)

# Values from 2^(e - 1) to below 2^e belong to the power e; others to the nearest of these.
LOWEST, HIGHEST = -47, 16
_POWERS = HIGHEST - LOWEST + 1
_ZERO, _NONFINITE = _POWERS, 2 * _POWERS + 1
_COUNTS = 2 * _POWERS + 2  # negative ones, zero, positive ones, and those that are not finite

_ROWS = 80  # a picture with more cannot be read


class Histograms:
    """Records the histograms of a run, in the steps that are multiples of `every`; 0 takes none."""

    def __init__(
        self, every: int = 0, run_dir: Path | None = None, tracker: Tracker | None = None
    ) -> None:
        self._every, self._run_dir = every, run_dir or Path()
        self._tracker = tracker or NullTracker()
        self._names: list[str] = []

    def take(self, model: ParallelModel, factor: Scalar) -> None:
        """Record the histograms of a step, if they are due; all ranks call this together.

        The model is after a backward pass, before its update. The factor makes its gradient that of
        the global batch.
        """
        step = model.step + 1
        if not self._every or step % self._every:
            return
        self._names = self._names or names_of_all_stages(model)
        places = [self._names.index(name) for name in model.names]
        gradients = [p.grad for p in model.parameters]
        found = {
            "gradients": self._counted(model, places, gradients, factor),
            "weights": self._counted(model, places, [*model.parameters], 1.0),
        }
        if dist.get_rank() == 0:
            self._record(step, found)

    def _counted(
        self,
        model: ParallelModel,
        places: list[int],
        tensors: list[torch.Tensor | None],
        factor: Scalar,
    ) -> dict[str, dict[str, Any]]:
        """Return the rows of all parameters of the model, the same on all ranks."""
        total = torch.zeros(
            len(self._names), _COUNTS + 2, dtype=torch.float64, device=model.mesh.device
        )
        for place, tensor in zip(places, tensors, strict=True):
            if tensor is not None:
                # Each of the ranks that have the same elements adds its part of the counts.
                total[place] += _row(tensor, factor).to(total.device) / copies(tensor, model.mesh)
        model.mesh.add(total)
        rows = zip(self._names, total.tolist(), strict=True)
        return {name: _readable(row) for name, row in rows if sum(row[:_COUNTS])}

    def _record(self, step: int, found: dict[str, dict[str, dict[str, Any]]]) -> None:
        for kind, rows in found.items():
            wrong = {name: row["nonfinite"] for name, row in rows.items() if row["nonfinite"]}
            if wrong:
                first = next(iter(wrong))
                log.warning(
                    "step %d: %d values of %d parameters are not finite in the histograms of %s, "
                    "such as %d of %s",
                    *(step, sum(wrong.values()), len(wrong), kind, wrong[first], first),
                )
        file = self._run_dir / "artifacts" / "histograms" / f"{step_name(step)}.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            content = {"step": step, "powers": [LOWEST, HIGHEST], **found}
            write_atomically(file, json.dumps(content) + "\n", sync=False)
        except OSError as error:  # a full disk costs a histogram, and not the run
            log.warning("a histogram is lost: %s", error)
            return
        if isinstance(self._tracker, NullTracker):  # nobody would see pictures
            return
        self._tracker.log_file(file)
        for kind, rows in found.items():
            self._tracker.log_figure(
                f"histograms/{kind}", picture(rows, f"{kind}, step {step}", LOWEST), step
            )


def names_of_all_stages(model: ParallelModel) -> list[str]:
    """Return the names of the parameters of all stages, in their order."""
    if model.mesh.degrees.pp == 1:
        return model.names
    stages = objects.all_gather(model.names, model.mesh.pp_group)
    return list(dict.fromkeys(name for names in stages for name in names))


def _row(tensor: torch.Tensor, factor: Scalar) -> torch.Tensor:
    """Return the counts, the sum and the sum of squares of what this rank has of a tensor."""
    values = local(tensor).detach().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    if values.element_size() < 4:
        values = values.float()
    values = values * (factor.to(values.device) if isinstance(factor, torch.Tensor) else factor)
    finite = values.isfinite()
    values = torch.where(finite, values, 0)
    powers = torch.frexp(values).exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1
    places = torch.where(finite, _ZERO + powers * values.sign().int(), _NONFINITE)
    counts = torch.bincount(places, minlength=_COUNTS).double()
    exact = values.double()
    return torch.cat([counts, torch.stack([exact.sum(), exact.square().sum()])])


def _readable(row: list[float]) -> dict[str, Any]:
    """Return a row as JSON. The parts of several ranks add up to whole numbers but for rounding."""
    counts, (total, squares) = [round(n) for n in row[:_COUNTS]], row[_COUNTS:]
    count = max(1, sum(counts[:_NONFINITE]))
    mean = total / count
    return {
        "negative": counts[:_ZERO][::-1],
        "zero": counts[_ZERO],
        "positive": counts[_ZERO + 1 : _NONFINITE],
        "nonfinite": counts[_NONFINITE],
        "mean": mean,
        "std": max(0.0, squares / count - mean**2) ** 0.5,
    }


def picture(rows: dict[str, dict[str, Any]], title: str, lowest: int) -> Any:
    """Return a figure of matplotlib; `lowest` is the power of two of the first bin.

    If there are too many rows, those of a module are added up.
    """
    from matplotlib.figure import Figure  # without pyplot, which would keep the figure

    sizes, nonfinite = _grouped(rows)
    filled = [i for counts in sizes.values() for i, n in enumerate(counts) if n]
    first, last = min(filled, default=0), max(filled, default=0)
    figure = Figure(figsize=(9, 1.6 + 0.2 * len(sizes)), layout="constrained")
    axes = figure.subplots()
    shares = [
        [n / max(1, sum(counts)) for n in counts[first : last + 1]] for counts in sizes.values()
    ]
    edges = (lowest + first - 1, lowest + last)
    image = axes.imshow(
        shares,
        cmap="viridis",
        aspect="auto",
        interpolation="nearest",
        extent=(*edges, len(sizes) - 0.5, -0.5),
    )
    names = [f"{n} ({nonfinite[n]} not finite)" if nonfinite[n] else n for n in sizes]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(title=title, xlabel="size of the values, as a power of 2 (without zeros)")
    for label, name in zip(axes.get_yticklabels(), sizes, strict=True):
        label.set_color("red" if nonfinite[name] else "black")
    figure.colorbar(image, ax=axes, label="part of the values")
    return figure


def _grouped(rows: dict[str, dict[str, Any]]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the counts by power of two, and those that are not finite, in at most _ROWS rows."""
    depth = max((name.count(".") + 1 for name in rows), default=1)
    while depth > 1 and len({_head(name, depth) for name in rows}) > _ROWS:
        depth -= 1
    sizes: dict[str, list[int]] = {}
    nonfinite: dict[str, int] = {}
    for name, row in rows.items():
        group = _head(name, depth)
        both = [n + p for n, p in zip(row["negative"], row["positive"], strict=True)]
        sizes[group] = [a + b for a, b in zip(sizes.get(group, [0] * len(both)), both, strict=True)]
        nonfinite[group] = nonfinite.get(group, 0) + row["nonfinite"]
    return sizes, nonfinite


def _head(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])
