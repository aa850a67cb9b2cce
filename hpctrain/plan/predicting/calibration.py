"""`plan --from-run RUN`: what a run has measured takes the place of assumed efficiencies.

    predicted for the run = compute + rest + communication that is not hidden
    measured by the run   = a x compute + b x rest + c x communication, and the wait for data

a, b and c hold for other sizes, batches and numbers of ranks of the same model. One run gives one
number for a and b; several runs of different sizes give both (least squares of relative errors).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean as mean

import numpy as np

from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.estimates.measured_run import MeasuredRun
from hpctrain.hardware import Hardware, Link, of_device, of_section
from hpctrain.plan.layouts import Layout
from hpctrain.plan.predicting.rank_memory import RankMemory
from hpctrain.plan.predicting.timing import StepTime

# Figures that stand for a CPU; the run says how far they are from the real ones.
_CPU_FLOPS, _CPU_BYTES_PER_S = 50e9, 10e9
_CPU_LINK = Link("between processes", 1e9, 50e-6)


@dataclass(frozen=True)
class Calibration:
    """What runs say about the times of others."""

    runs: tuple[MeasuredRun, ...]
    compute: float  # factor of the time of matrix products
    rest: float  # factor of the other work of a rank
    communication: float | None  # factor of what is not hidden; None if no run has measured it
    data_wait: float  # the part of a step that waits for data
    memory: float | None  # factor of that of tensors; None if no run has measured it
    errors: tuple[float, ...]  # of each run: predicted step time / measured one - 1

    def time(self, predicted: StepTime) -> StepTime | None:
        """Return the calibrated time; None if it needs communication that no run has measured."""
        if predicted.comm_s and self.communication is None:
            return None
        compute, rest, exposed = _parts(predicted)
        factor = self.communication or 0.0
        step = self.compute * compute + self.rest * rest + factor * exposed
        step /= 1 - self.data_wait
        return StepTime(
            *(step, predicted.compute_s * self.compute, predicted.memory_s * self.rest),
            *(predicted.comm_s * factor, predicted.exposed_comm_s * factor),
            *(predicted.bubble, predicted.mfu * predicted.step_s / step),
        )

    def bytes(self, predicted: RankMemory) -> RankMemory:
        """Return the calibrated memory."""
        if self.memory is None:
            return predicted
        tensors = int(predicted.tensors * self.memory)
        return replace(predicted, total=tensors + predicted.allowance)

    @property
    def assumptions(self) -> dict[str, str]:
        """What the answer says about the runs."""
        sent = self.communication
        told = {
            "measured": "; ".join(map(str, self.runs)),
            "factors": f"matrix products take {self.compute:.3g} times, the rest {self.rest:.3g} "
            "times as long as the data sheet would let them",
            "communication": "unknown: the runs had one rank"
            if sent is None
            else f"{sent:.3g} times the exposed part of the link's formula",
            "data": f"{self.data_wait:.1%} of a step waits for data",
        }
        if self.memory is not None:
            told["peak memory"] = f"{self.memory:.3g} times what the formulas give"
        if len(self.runs) > 1:
            told["errors of the runs"] = ", ".join(f"{error:+.1%}" for error in self.errors)
        return told


def hardware_of(config: Config, hardware: Hardware | None, runs: Sequence[MeasuredRun]) -> Hardware:
    """Return the hardware of the runs; a ConfigError if one of them does not fit the plan."""
    first, mine = runs[0], _alike(config)
    what, on_cpu = f"--from-run {first.path}", first.device == "CPU"
    for run in runs:
        its = f"--from-run {run.path}"
        for name, there in _alike(run.config).items():
            if there != mine[name]:
                raise ConfigError(f"{its}: {name} is {there} there, and {mine[name]} here")
        if not run.device:
            raise ConfigError(f"{its}: it is of an older version, which did not note its device")
        if run.device != first.device:
            raise ConfigError(f"{its}: it ran on {run.device}, and {first.path} on {first.device}")
    cores = {run.config.launch.cpus_per_task for run in runs} | {config.launch.cpus_per_task}
    if on_cpu and len(cores) > 1:
        raise ConfigError(
            f"{what}: launch.cpus_per_task is {sorted(cores)} in the runs and the plan; a CPU is "
            "as fast as its cores, so give the same number"
        )
    known = hardware if on_cpu or hardware else of_device(first.device)
    if known is not None and known.name != "cpu" and first.device not in known.devices:
        other = f"hardware={known.name} ({known.title})"
        raise ConfigError(f"{what}: it ran on {first.device}, which is not {other}")
    if on_cpu and (known is None or not known.peak_flops):
        return replace(
            known or of_section({}),
            name="cpu",
            title="the CPU of the run",
            peak_flops={config.precision.compute: _CPU_FLOPS},
            memory_bandwidth=_CPU_BYTES_PER_S,
            inside=_CPU_LINK,
            between=_CPU_LINK,
            matmul_efficiency=0.8,
        )
    if known is None:
        missing = f"conf/hardware has no file for {first.device}"
        raise ConfigError(f"{what}: {missing}; write one, and name it with hardware=NAME")
    return known


def layout_of(run: MeasuredRun) -> Layout:
    """Return the layout of a run as `plan` would predict it, on the ranks that it really had."""
    config = copy.deepcopy(run.config)
    config.launch.nodes, config.launch.tasks_per_node = run.nodes, run.ranks // run.nodes
    return Layout(config, run.nodes, (), named=True)


def calibrated(
    runs: Sequence[MeasuredRun],
    predicted: Sequence[tuple[StepTime | None, RankMemory]],
    hardware: Hardware,
) -> Calibration:
    """Return what the runs say, beside what is predicted for them."""
    times = [time for time, _ in predicted if time]
    if len(times) < len(runs):
        raise ConfigError(
            f"--from-run: the FLOPs of the runs, or a figure of hardware={hardware.name}, are "
            "unknown, so there is nothing to compare their times with"
        )
    parts = [_parts(time) for time in times]
    own = [run.step_s * (1 - run.data_wait - (run.communication or 0.0)) for run in runs]
    compute, rest = _factors(parts, own)
    sent = [
        run.step_s * run.communication / exposed
        for run, (_, _, exposed) in zip(runs, parts, strict=True)
        if run.communication is not None and exposed > 0
    ]
    on_gpus = any(time.comm_s > 0 for time in times) and runs[0].device != "CPU"
    communication = mean(sent) if sent else (compute if on_gpus else None)
    ratios = [
        run.peak_bytes / memory.tensors
        for run, (_, memory) in zip(runs, predicted, strict=True)
        if run.peak_bytes is not None
    ]
    factors = compute, rest, communication, mean(run.data_wait for run in runs)
    found = Calibration(tuple(runs), *factors, max(ratios, default=None), ())
    again = [(found.time(time), run.step_s) for run, time in zip(runs, times, strict=True)]
    errors = [time.step_s / measured - 1 if time else 0.0 for time, measured in again]
    return replace(found, errors=tuple(errors))


def _factors(
    parts: Sequence[tuple[float, float, float]], own: Sequence[float]
) -> tuple[float, float]:
    """Return the factors of products and of the rest, which are the same with one run."""
    if len(parts) > 1:
        relative = np.array([[c / s, r / s] for (c, r, _), s in zip(parts, own, strict=True)])
        (compute, rest), *_ = np.linalg.lstsq(relative, np.ones(len(parts)), rcond=None)
        if compute > 0 and rest > 0:
            return float(compute), float(rest)
    ratio = mean(seconds / (c + r) for (c, r, _), seconds in zip(parts, own, strict=True))
    return ratio, ratio


def _parts(time: StepTime) -> tuple[float, float, float]:
    """Return the seconds of products, of other work, and of communication that is not hidden."""
    stretch = 1 / (1 - min(time.bubble, 0.95))
    exposed = time.exposed_comm_s * stretch
    compute = time.compute_s * stretch
    return compute, max(0.0, time.step_s - exposed - compute), exposed


def _alike(config: Config) -> dict[str, object]:
    """Return what must be the same in a run and in the plan that rests on it."""
    return {
        "model._target_": config.model.get("_target_"),
        "precision.compute": config.precision.compute,
        "train.compile": config.train.compile,
    }
