"""The race: a job of two nodes in which a rank is killed every so many steps, until it has ended.

    python -m tests.benchmarks.faults_race --steps 2000 --every 200

A table of wall times, beside those without a failure, and of the seconds from each kill to the
next new step. It needs a Slurm cluster, and starts the development cluster if there is none. The
rivals take part where their packages are installed: Lightning, whose job asks for its requeue when
srun has failed, as its users write it, and ft_launcher of nvidia-resiliency-ext.
"""

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests import cluster
from tests.conftest import run_module
from tests.faults.cluster_events import Job
from tests.faults.disturbed import signal_to

SAVE_EVERY, STEP_S = 10, 0.05

LIGHTNING = """\
import os, pathlib, sys, time
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

HERE, STEPS, EVERY, PAUSE = pathlib.Path(__file__).parent, *map(float, sys.argv[1:])
RANK = os.environ.get("RANK") or os.environ["SLURM_PROCID"]

class Noted(Callback):
    def on_train_batch_end(self, trainer, *_):
        with open(HERE / f"steps.{RANK}", "a") as file:
            file.write(f"{trainer.global_step} - - {os.getpid()} {time.monotonic()}\\n")

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
            torch.nn.Linear(256, 10))

    def training_step(self, batch, _):
        time.sleep(PAUSE)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

data = torch.utils.data.TensorDataset(torch.rand(1415, 64), torch.randint(0, 10, (1415,)))
saves = ModelCheckpoint(HERE, every_n_train_steps=int(EVERY), save_last=True)
trainer = L.Trainer(
    accelerator="cpu", num_nodes=2, devices=1, strategy="ddp", max_steps=int(STEPS), logger=False,
    enable_progress_bar=False, callbacks=[saves, Noted()])
last = HERE / "last.ckpt"
trainer.fit(Net(), torch.utils.data.DataLoader(data, 32), ckpt_path=last if last.exists() else None)
"""


@dataclass
class Ours(Job):
    """The job of hpctrain."""

    steps_asked: int = 2000
    step_s: float = STEP_S

    def __post_init__(self) -> None:
        super().__post_init__()
        self.more = (
            *(f"train.max_steps={self.steps_asked}", f"checkpoint.every_steps={SAVE_EVERY}"),
            *("train.early_stopping.metric=null", "train.eval_every=1000", "train.max_epochs=null"),
        )
        for rank in range(2):
            self.order(rank, f"slow {self.step_s}")


@dataclass
class Lightning(Ours):
    """The job of Lightning."""

    launch = f"srun --kill-on-bad-exit=1 {sys.executable} {{}} || scontrol requeue $SLURM_JOB_ID"

    @property
    def state(self) -> str:
        """What Slurm says of the job, which has no run of ours."""
        return cluster.job_state(self.id)

    def start(self) -> None:
        (self.folder / "train.py").write_text(LIGHTNING)
        script = self.launch.format(f"train.py {self.steps_asked} {SAVE_EVERY} {self.step_s}")
        shape = ["--nodes=2", "--ntasks-per-node=1", "--requeue", f"--chdir={self.folder}"]
        self.id = cluster.sbatch(script, *shape, "--open-mode=append", "--output=out")


@dataclass
class FtLauncher(Lightning):
    """The same training below ft_launcher, which starts the ranks again in the same job."""

    launch = (
        "first=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1); "
        f"srun {Path(sys.executable).with_name('ft_launcher')} --nnodes=2 --nproc-per-node=1 "
        "--rdzv-backend=c10d --rdzv-endpoint=$first:$((29400 + SLURM_JOB_ID % 100)) "
        "--rdzv-id=$SLURM_JOB_ID --max-restarts=100 --ignore-missing-fault-tol-cfg {}"
    )


RIVALS: dict[str, tuple[type[Ours], str]] = {
    "hpctrain": (Ours, "hpctrain"),
    "Lightning, requeue": (Lightning, "lightning"),
    "Lightning, ft_launcher": (FtLauncher, "nvidia_resiliency_ext"),
}


@dataclass
class Result:
    """How a job has come to its end."""

    seconds: float = 0.0  # from its first step to its last one
    recoveries: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    state: str = ""


def _kills(every: int | None, steps: int) -> list[int]:
    """Return the steps of the kills, each in the middle of an interval of saves."""
    return [step + SAVE_EVERY // 2 for step in range(every, steps, every)] if every else []


def race(job: Ours, every: int | None, *, hurry: bool) -> Result:
    """Run a job to its end, and kill a rank after each multiple of `every`."""
    job.start()
    result, kills, began = Result(), iter(_kills(every, job.steps_asked)), 0.0
    victim, pending = next(kills, 0), 0
    while (state := job.state) not in cluster.ENDED:
        if state == "PENDING" and hurry and began:
            cluster.tool("hurry", job.id)
        seen = job.steps(0)
        if began and seen[-1].time > began and seen[-1].pid != pending:
            first = next(each for each in seen if each.time > began and each.pid != pending)
            result.recoveries.append(first.time - began)
            result.lost.append(max(e.number for e in seen if e.pid == pending) + 1 - first.number)
            began = 0.0
        if victim and not began and seen and seen[-1].number >= victim:
            pending, began = seen[-1].pid, time.monotonic()
            signal_to([job.pids()[1]], signal.SIGKILL)
            victim = next(kills, 0)
        time.sleep(0.2)
    seen = job.steps(0)
    result.seconds, result.state = seen[-1].time - seen[0].time, state
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.faults_race")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200, help="steps from one kill to the next")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="what each step waits")
    parser.add_argument("--only", default="", help="the contestants whose name has this text")
    parser.add_argument("--hurry", action="store_true", help="a requeued job starts at once")
    asked = parser.parse_args()
    if problem := cluster.problem():
        sys.exit(problem)
    head = f"{'':24}{'undisturbed s':>14}{'s':>9}{'ratio':>7}"
    print(f"{head}{'recovery s: median, 90%, most':>32}  most steps lost", flush=True)
    with tempfile.TemporaryDirectory(prefix="hpctrain-race-") as folder:
        digits = Path(folder, "digits")
        run_module("data_prep", "sample", "digits", str(digits))
        for name, (kind, module) in RIVALS.items():
            if asked.only not in name:
                continue
            if importlib.util.find_spec(module) is None:
                print(f"{name:24} is not installed ({module})")
                continue
            place = Path(folder, name.replace(", ", "-"))
            with ThreadPoolExecutor() as pool:  # side by side, on the same four nodes
                calm, wild = pool.map(
                    lambda how, every, kind=kind, place=place: race(
                        kind(place / how, digits, steps_asked=asked.steps, step_s=asked.step_s),
                        every,
                        hurry=asked.hurry,
                    ),
                    ("calm", "wild"),
                    (None, asked.every),
                )
            times = sorted(wild.recoveries) or [0.0]
            shown = [times[int(part * (len(times) - 1))] for part in (0.5, 0.9, 1.0)]
            print(
                f"{name:24}{calm.seconds:14.0f}{wild.seconds:9.0f}"
                f"{wild.seconds / calm.seconds:7.2f}"
                f"{', '.join(f'{x:.1f}' for x in shown):>32}  {max(wild.lost, default=0)} "
                f"({len(wild.recoveries)} kills, {calm.state}, {wild.state})",
                flush=True,
            )


if __name__ == "__main__":
    main()
