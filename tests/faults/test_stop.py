"""A signal sets a flag, and the ranks agree on the flags."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch

from hpctrain.faults.stop import Stop
from tests.ranks import run_ranks
from tests.steps import batch, make

pytestmark = pytest.mark.usefixtures("group_of_one")


def test_a_signal_sets_its_flag_and_the_ranks_agree() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        end = time.monotonic() + 5
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
        assert (stop.asked, stop.flags()) == ("SIGUSR2", [0.0, 0.0, 0.0, 1.0])
        assert (stop.agreed, stop.reason) == (False, "")  # the ranks have not agreed yet
        stop.offer(torch.tensor([0.0, 0.0, 1.0, 3.0]))  # one rank got SIGTERM, three SIGUSR2
        assert (stop.agreed, stop.reason) == (True, "SIGTERM")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def step_with_a_signal(which: int) -> tuple[str, bool, str]:
    """Make a training step on a rank; the rank `which` receives SIGTERM before it."""
    step = make()
    with step.stop as stop:
        if torch.distributed.get_rank() == which:
            os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + 5
            while not stop.asked and time.monotonic() < end:
                time.sleep(0.01)
        step(batch(8), 1e-2)
    return stop.asked, stop.agreed, stop.reason


def test_all_ranks_agree_after_the_step_in_which_one_was_signalled() -> None:
    assert run_ranks(step_with_a_signal, 2, 1) == [
        ("", True, "SIGTERM"),
        ("SIGTERM", True, "SIGTERM"),
    ]
    assert run_ranks(step_with_a_signal, 2, None) == [("", False, "")] * 2


def test_a_signal_is_seen_while_the_main_thread_is_blocked() -> None:
    """A Python signal handler would wait until the collective ends; the flag is set at once."""
    seen: list[str] = []

    def watch() -> None:
        threading.Event().wait(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.5)
        seen.append(stop.asked)

    with Stop() as stop:
        watcher = threading.Thread(target=watch)
        watcher.start()
        # This blocks outside Python, like a collective with a late rank. The watcher ends earlier.
        store = torch.distributed.HashStore()
        with pytest.raises(RuntimeError):
            store.wait(["a key that nobody sets"], timedelta(seconds=2))
        watcher.join()
    assert seen == ["SIGTERM"]


def test_a_second_ctrl_c_ends_at_once() -> None:
    program = (
        "import os, signal, time; from hpctrain.faults.stop import Stop\n"
        "with Stop() as stop:\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(1)\n"
        "        print(stop.asked, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "SIGINT\n")
