"""`plan --from-run RUN`: what a run has measured takes the place of assumed efficiencies.

    predicted for the run = compute + rest + communication that is not hidden
    measured by the run   = a x (compute + rest) + b x communication, and the wait for data

a and b hold for other sizes, batches and numbers of ranks of the same model.
"""

import copy
from dataclasses import dataclass, replace

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
    """What a run says about the times of others."""

    run: MeasuredRun
    own: float  # factor of the work of a rank
    communication: float | None  # factor of what is not hidden; None if the run had one rank
    memory: float | None  # factor of that of tensors; None if the run has not measured it

    def time(self, predicted: StepTime) -> StepTime | None:
        """Return the calibrated time; None if it needs communication that no run has measured."""
        if predicted.comm_s and self.communication is None:
            return None
        own, exposed = _parts(predicted)
        factor = self.communication or 0.0
        step = (self.own * own + factor * exposed) / (1 - self.run.data_wait)
        return StepTime(
            *(step, predicted.compute_s * self.own, predicted.memory_s * self.own),
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
        """What the answer says about the run."""
        sent = self.communication
        told = {
            "measured": str(self.run),
            "factors": f"a rank works {self.own:.3g} times as long as the data sheet would let it",
            "communication": "unknown: the run had one rank"
            if sent is None
            else f"{sent:.3g} times the exposed part of the link's formula",
            "data": f"{self.run.data_wait:.1%} of a step waits for data",
        }
        if self.memory is not None:
            told["peak memory"] = f"{self.memory:.3g} times what the formulas give"
        return told


def hardware_of(config: Config, hardware: Hardware | None, run: MeasuredRun) -> Hardware:
    """Return the hardware of the run; a ConfigError if it does not fit the plan."""
    mine, what, on_cpu = _alike(config), f"--from-run {run.path}", run.device == "CPU"
    for name, there in _alike(run.config).items():
        if there != mine[name]:
            raise ConfigError(f"{what}: {name} is {there} there, and {mine[name]} here")
    if not run.device:
        raise ConfigError(f"{what}: it is of an older version, which did not note its device")
    cores = {run.config.launch.cpus_per_task, config.launch.cpus_per_task}
    if on_cpu and len(cores) > 1:
        raise ConfigError(
            f"{what}: launch.cpus_per_task is {sorted(cores)} in the run and the plan; a CPU is "
            "as fast as its cores, so give the same number"
        )
    known = hardware if on_cpu or hardware else of_device(run.device)
    if known is not None and known.name != "cpu" and run.device not in known.devices:
        other = f"hardware={known.name} ({known.title})"
        raise ConfigError(f"{what}: it ran on {run.device}, which is not {other}")
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
        missing = f"conf/hardware has no file for {run.device}"
        raise ConfigError(f"{what}: {missing}; write one, and name it with hardware=NAME")
    return known


def layout_of(run: MeasuredRun) -> Layout:
    """Return the layout of a run as `plan` would predict it, on the ranks that it really had."""
    config = copy.deepcopy(run.config)
    config.launch.nodes, config.launch.tasks_per_node = run.nodes, run.ranks // run.nodes
    return Layout(config, run.nodes, (), named=True)


def calibrated(
    run: MeasuredRun, time: StepTime | None, memory: RankMemory, hardware: Hardware
) -> Calibration:
    """Return what the run says, beside what is predicted for it."""
    if time is None:
        raise ConfigError(
            f"--from-run: the FLOPs of the run, or a figure of hardware={hardware.name}, are "
            "unknown, so there is nothing to compare its times with"
        )
    worked, exposed = _parts(time)
    own = run.step_s * (1 - run.data_wait - (run.communication or 0.0)) / worked
    communication = own if time.comm_s > 0 and run.device != "CPU" else None
    if run.communication is not None and exposed > 0:
        communication = run.step_s * run.communication / exposed
    peak = None if run.peak_bytes is None else run.peak_bytes / memory.tensors
    return Calibration(run, own, communication, peak)


def _parts(time: StepTime) -> tuple[float, float]:
    """Return the seconds of a rank's own work, and of communication that is not hidden."""
    exposed = time.exposed_comm_s / (1 - min(time.bubble, 0.95))
    return max(1e-9, time.step_s - exposed), exposed


def _alike(config: Config) -> dict[str, object]:
    """Return what must be the same in a run and in the plan that rests on it."""
    return {
        "model._target_": config.model.get("_target_"),
        "precision.compute": config.precision.compute,
        "train.compile": config.train.compile,
    }
