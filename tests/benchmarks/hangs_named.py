"""From a hang to the sentence in hang.json, with the keys as they are shipped.

    python -m tests.benchmarks.hangs_named --times 3
    python -m tests.benchmarks.hangs_named --times 3 --cluster

A table of seconds, on a real training of two ranks: one below torchrun, or a job of two nodes. In
each round rank 1 of one training is stopped, and in others it holds Python's lock in C code, waits
for data, or sleeps in a step. In the last one it is only slow, and a note says so. All trainings of
a round run at the same time.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests import cluster
from tests.conftest import run_module
from tests.faults.cluster_events import Job
from tests.faults.disturbed import Training, descendants, signal_to, wait_for

HANGING = """\
import ctypes, os, time
from pathlib import Path
import disturbed_task

class Task(disturbed_task.Task):
    def __call__(self, model, batch):
        if disturbed_task.orders() == ["lock"]:
            ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        return super().__call__(model, batch)

def block(sample, random):
    while Path(__file__).with_name(f"block.{os.getppid()}").exists(): time.sleep(0.1)
    return sample
"""
EVENTS = {
    "SIGSTOP": "",
    "C code with Python's lock": "lock",
    "waits for data": "data",
    "sleeps in a step": "slow 10000",
    "slow: 0.4 s for 0.05 s a step": "slow 0.4",
}


def seconds(training: Training, order: str) -> tuple[float, str]:
    """Let rank 1 of a training hang; return the seconds until it is named, and the sentence."""
    (training.folder / "hanging_task.py").write_text(HANGING)
    training.more = (
        *("task._target_=hanging_task.Task", "train.early_stopping.metric=null"),
        *("data.transforms=[{_target_: hanging_task.block, _partial_: true}]", "data.workers=1"),
        *("train.max_steps=100000", "train.max_epochs=null", "parallel.timeout_s=600"),
    )
    for rank in range(2):
        training.order(rank, "slow 0.05")
    training.start()
    try:
        wait_for(lambda: training.at()[1] > 60, "60 steps")
        time.sleep(5)
        began = time.time()
        if order == "data":
            (training.folder / f"block.{training.pids()[1]}").touch()
        elif order:
            training.order(1, order)
        else:
            signal_to([training.pids()[1]], signal.SIGSTOP)
        while time.time() - began < 300:
            with suppress(FileNotFoundError):
                said = json.loads((training.run / "hang.json").read_text())["sentence"]
                return time.time() - began, said
            for note in json.loads((training.run / "run.json").read_text()).get("notes", ()):
                if " is slow: " in str(note):
                    return time.time() - began, str(note)
            time.sleep(0.05)
        return float("inf"), "nothing"
    finally:
        if isinstance(training, Job):
            cluster.slurm("scancel", training.id)
            cluster.wait_for_end([training.id])
        else:
            pids = [training.process.pid, *descendants(training.process.pid)]
            signal_to(pids, signal.SIGKILL)
            training.process.wait()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hangs_named")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--cluster", action="store_true", help="jobs of two nodes")
    parser.add_argument("--at-once", type=int, default=5, help="trainings")
    asked = parser.parse_args()
    if asked.cluster and (problem := cluster.problem()):
        sys.exit(problem)
    kind = Job if asked.cluster else Training
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in EVENTS}
    with tempfile.TemporaryDirectory(prefix="hpctrain-hangs-") as place:
        digits = Path(place, "digits")
        run_module("data_prep", "sample", "digits", str(digits))
        cases = [(name, turn) for turn in range(asked.times) for name in EVENTS]
        with ThreadPoolExecutor(asked.at_once) as pool:
            trainings = (kind(Path(place, f"{number}"), digits) for number in range(len(cases)))
            orders = (EVENTS[name] for name, _ in cases)
            for (name, _), one in zip(cases, pool.map(seconds, trainings, orders), strict=True):
                found[name].append(one)
    for name, times in found.items():
        print(f"{name:32}" + "".join(f"{each:8.1f}" for each, _ in times))
        print("\n".join(f"    {said}" for _, said in times))


if __name__ == "__main__":
    main()
