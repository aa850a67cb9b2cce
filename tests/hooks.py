"""Hooks of pytest: slow tests are left out, CI accepts only declared skips, outcomes are kept."""

import gc
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver

# The skips that are allowed where CI=true: a pattern of the reason, and why it is allowed. Any
# other skip is a failure there, because a test that never runs protects nothing.
DECLARED = {
    r"no CUDA|needs two GPUs": "a machine without a GPU, or with one",
    r"torchao is for make test-all": "transformers imports it where it is, and is then slow",
    r"Skipping benchmark": "benchmarks run with --benchmark-only",
    r"root may (read|write) every(thing|where)": "the tests run as root in a container",
    r"shards of different sizes": "one of the parametrised cases has no such shards",
    r"(torchvision|timm) cannot be imported": "PyPI's torchvision needs torch's CUDA build",
    r"(neuralop|x_transformers|monai|diffusers) cannot be imported": "it may not fit this torch",
    r"mosaicml-streaming is not installed": "its requirements exclude ours; slow only",
}
# What takes longest begins first, so that the worker processes of pytest-xdist end together. A
# worker process gets whole files without a cluster, and single tests with one (tests/run.sh).
LONGEST = (
    *("test_preempted_requeued_resumed", "test_from_the_queue_to_the_end"),
    "test_a_sweep_of_two_jobs_of_two_nodes",
    "test_a_killed_rank_and_one_that_hangs_are_started_again_in_the_same_job",
    *("test_mlflow_server_serves_other_nodes", "test_container"),
    "test_preempted_on_two_nodes_it_comes_back_with_its_frozen_config",
    *("test_a_chain_goes_on_where_slurm_cancels", "test_train_over_two_nodes"),
    "test_a_debugger_at_the_error_of_a_run_and_at_its_first_step",
    *("test_runs_and_functions_are_jobs_of_submitit", "test_three_runs_share_a_whole_node"),
    "test_failed_runs_keep_their_code_unless_todays_is_asked_for",
    *("parallel/test_parity.py", "test_docs.py", "job/test_train.py", "tests/test_secrets.py"),
    *("tracking/test_tracking_server.py", "tracking/test_uploader.py", "launch/test_sweepers.py"),
    "parallel/test_checkpoints.py",
    *("commands/test_status.py", "job/test_environment.py", "data/test_reader.py"),
    *("parallel/test_compile.py", "parallel/test_compression.py", "launch/test_launch.py"),
    *("launch/test_api.py", "plan/test_answer.py", "commands/test_output.py"),
)
# These tests use warm ranks (tests/ranks.py). One worker process gets all of them: each other one
# would have to warm ranks of its own.
RANKS = ("tests/parallel/", "tests/checkpoint/", "tests/faults/", "tests/test_run_ranks.py")
_ALWAYS_SLOW = re.compile(r"^@pytest\.mark\.slow$|^pytestmark = .*mark\.slow", re.M)
left_out = pytest.StashKey[int]()
# The outcome of each test, for tests/second_try.py; the worst of set-up, call and tear-down counts.
# "broken" is what no second try mends: a crashed worker process, a file that cannot be collected.
outcomes: dict[str, str] = {}
OUTCOMES = ("passed", "skipped", "failed", "broken")
# The imports of the tests make many objects and drop few; see pytest_collection_finish.
gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m slurm`, leave out the files that have no such test to run: importing takes seconds.

    The decorators of a test with a cluster that is slow stand one a line.
    """
    if config.getoption("markexpr") != "slurm" or not collection_path.match("test_*.py"):
        return None
    marks = re.findall(r"(?:^(?:@|pytestmark = ).*\n)+", collection_path.read_text(), re.M)
    cluster = [mark for mark in marks if "mark.slurm" in mark]
    if not config.getoption("--all"):
        cluster = [each for each in cluster if not _ALWAYS_SLOW.search(each)]
    return None if cluster else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests marked slow")
    parser.addoption("--outcomes", help="a JSON file for the outcome of each test, at the end")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.getoption("--all") or "slow" in config.getoption("markexpr")
    away = [] if chosen else [item for item in items if item.get_closest_marker("slow")]
    config.stash[left_out] = len(away)
    if hasattr(config, "workeroutput"):  # a worker process of pytest-xdist, which prints no summary
        config.workeroutput["left_out"] = len(away)
    if away:
        config.hook.pytest_deselected(items=away)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=_order)


def _order(item: pytest.Item) -> int:
    path, _, test = item.nodeid.partition("::")
    test = test.partition("[")[0]
    places = (i for i, name in enumerate(LONGEST) if test == name or path.endswith(name))
    return next(places, len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, hand out whole files, and all files of `RANKS` to one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return "ranks" if scope.startswith(RANKS) else scope

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Store the count of a worker process; all of them collect the same tests."""
    node.config.stash[left_out] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # pytest-xdist reports the test in which a worker process died with this phase.
    outcome = "broken" if str(report.when) == "???" else report.outcome
    # With `--dist loadgroup`, pytest-xdist appends the test's group: `test_a[x]@group`.
    test = re.sub(r"@[^]@/:]*$", "", report.nodeid)
    outcomes[test] = max(outcomes.get(test, "passed"), outcome, key=OUTCOMES.index)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        outcomes[report.nodeid] = "broken"


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--outcomes")
    if file and not hasattr(session.config, "workerinput"):
        Path(file).write_text(json.dumps(outcomes, indent=1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Importing hdf5plugin, for example, sets variables that a fork cannot take over.
    forkserver.restore_start_variables()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(left_out, 0):
        terminalreporter.write_line(f"{count} slow tests were left out: make test-all runs them")


def _refuse(report: Any) -> None:
    """Turn a skip into a failure where CI=true, unless its reason is declared."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    where, line, reason = report.longrepr
    if not any(re.search(pattern, reason) for pattern in DECLARED):
        report.outcome = "failed"
        report.longrepr = (
            f"{where}:{line}: {reason}\n"
            "CI=true: a skip is a failure, unless tests/hooks.py declares its reason"
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    _refuse(report)
    if report.failed:
        forkserver.end_what_is_left()


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    outcome: Any = yield
    _refuse(outcome.get_result())
