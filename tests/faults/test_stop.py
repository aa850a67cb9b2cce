"""A signal sets a flag, and the ranks agree on the flags."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from hpctrain.engine.faults import early_signals
from hpctrain.engine.faults.stop import SIGNALS, Stop
from hpctrain.runs.state import stop_request
from tests import forkserver
from tests.conftest import ROOT, ignoring_sigint
from tests.ranks import run_ranks
from tests.steps import batch, make, stop_of

pytestmark = pytest.mark.usefixtures("group_of_one")


def wait_for_a_signal(stop: Stop) -> None:
    """Wait until the thread of `stop` has seen a signal, however busy the machine is."""
    end = time.monotonic() + 60
    while not stop.asked and time.monotonic() < end:
        time.sleep(0.01)


def test_a_signal_sets_its_flag_and_the_ranks_agree() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for_a_signal(stop)
        assert (stop.asked, stop.flags()) == ("SIGUSR2", [0.0, 0.0, 0.0, 1.0])
        assert (stop.agreed, stop.reason) == (False, "")  # the ranks have not agreed yet
        stop.offer(torch.tensor([0.0, 0.0, 1.0, 3.0]))  # one rank got SIGTERM, three SIGUSR2
        assert (stop.agreed, stop.reason) == (True, "SIGTERM")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def step_with_a_signal(which: int) -> tuple[str, bool, str]:
    """Make a training step on a rank; the rank `which` receives SIGTERM before it."""
    step = make()
    with stop_of(step) as stop:
        if torch.distributed.get_rank() == which:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for_a_signal(stop)
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
    store = torch.distributed.HashStore()

    def watch() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_a_signal(stop)
        seen.append(stop.asked)
        store.set("seen", "")

    with Stop() as stop:
        watcher = threading.Thread(target=watch)
        watcher.start()
        # This blocks outside Python, like a collective with a late rank, until the watcher ends it.
        store.wait(["seen"], timedelta(seconds=120))
        watcher.join()
    assert seen == ["SIGTERM"]


def test_a_second_ctrl_c_ends_at_once() -> None:
    program = (
        "import os, signal, time; from hpctrain.engine.faults.stop import Stop\n"
        "with Stop() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while not stop.asked: time.sleep(0.01)\n"
        "    print(stop.asked, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(100)\n"
        "    print('went on', flush=True)\n"
    )
    with ignoring_sigint():  # the state in which `command &` in a script starts
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "SIGINT\n")


@pytest.mark.parametrize("holds_the_lock", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_cannot_stop_exits_and_says_where_it_is(
    holds_the_lock: bool, tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(
        "import ctypes, os, signal, sys, time; from hpctrain.engine.faults.stop import Stop\n"
        "with Stop({'SIGTERM': 0.3}) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while not stop.asked: time.sleep(0.001)\n"
        f"    {'ctypes.PyDLL(None).usleep(10**9)' if holds_the_lock else 'time.sleep(1000)'}\n"
    )
    command = [sys.executable, "-m", "stuck"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = forkserver.run(command, capture_output=True, text=True, env=environment)
    if holds_the_lock:  # then only the kernel can end it
        assert done.returncode == -signal.SIGALRM
        return
    assert done.returncode == 143
    line = "asked to stop by SIGTERM 0 s ago, it is still at "
    assert f"{line}{tmp_path}/stuck.py:5 in <module>" in done.stderr
    assert "hpctrain-signals" in done.stderr or "Current thread" in done.stderr  # all stacks


def test_a_rank_that_has_stopped_does_not_exit() -> None:
    with Stop({"SIGTERM": 1000.0}) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.asked:
            time.sleep(0.001)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
        stop.met()
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_an_early_signal_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a local job is started with SIGINT ignored; others end at once by Ctrl-C."""
    monkeypatch.setattr(early_signals, "noted", [])
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        early_signals.note()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with ignoring_sigint():
            early_signals.note()
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
        with Stop() as stop:
            assert stop.asked == "SIGINT"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_command_heeds_ctrl_c_and_nohup(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        early_signals.heed_ctrl_c()
        heeded = signal.getsignal(number) is not signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert heeded == (number == signal.SIGINT)


def test_the_stop_file_is_seen(tmp_path: Path) -> None:
    stop_request.write(tmp_path, "me")
    request = stop_request.read(tmp_path)
    assert request is not None
    assert time.time() - request.time < 60
    # After a new submission the stop request is void.
    assert stop_request.read(tmp_path, since=time.time() + 1) is None
    with Stop() as stop:
        stop.watch(stop_request.StopRequest.path(tmp_path))
        end = time.monotonic() + 60
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
        assert stop.asked == "cancel"
    stop_request.StopRequest.drop(tmp_path)
    stop_request.StopRequest.drop(tmp_path)
    assert stop_request.read(tmp_path) is None
    stop_request.StopRequest.path(tmp_path).touch()  # a user may do it by hand
    assert stop_request.read(tmp_path) is not None
