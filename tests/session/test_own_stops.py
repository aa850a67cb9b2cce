"""A loop of one's own that is killed or stopped ends with the bits of the undisturbed run."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import journal, journal_metrics, run_json, runs
from tests.session import runs_of_own

SHORT = ("train.max_steps=30", "checkpoint.every_steps=5", "train.log_every=4")
Undisturbed = Callable[..., Path]


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A function that returns the run directory of an undisturbed run; it is made once."""
    made: dict[tuple[str, ...], Path] = {}

    def call(loop: str, *overrides: str, ranks: int = 1) -> Path:
        key = (loop, *overrides, str(ranks))
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            runs_of_own.started(digits, folder)(loop, *overrides, ranks=ranks)
            (made[key],) = runs(folder)
        return made[key]

    return call


def check_equal(run: Path, other: Path) -> None:
    """Check that a disturbed run has what the undisturbed one has, and each metric once."""
    runs_of_own.check_same_bits(run, other)
    assert journal_metrics(run) == journal_metrics(other)
    assert run_json(run)["state"] == "finished"
    assert run_json(run)["result"]["step"] == run_json(other)["result"]["step"]


CODES = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n != "SIGTERM" else n for n in CODES]
)
def test_a_stopped_gan_goes_on_exactly(
    name: str, digits: Path, tmp_path: Path, undisturbed: Undisturbed, store: Path
) -> None:
    start = runs_of_own.started(digits, store.parent)
    uploads = f"tracking.upload={name == 'SIGKILL'}".lower()
    step = random.Random(name).randrange(6, 28)
    (store.parent / f"{name}-{step}-0").touch()
    done = start("gan", *SHORT, uploads, code=CODES[name])
    assert "the loop is over" not in done.stdout, "what follows the loop belongs to its end"
    (run,) = runs(store.parent)
    if name != "SIGKILL":
        record = run_json(run)
        assert (record["state"], record["attempts"][-1]["reason"]) == ("interrupted", name)
    again = start("gan", *SHORT, uploads)
    assert "the loop is over 30" in again.stdout
    # A checkpoint that was being written when the process was killed does not exist.
    # A thread takes the other signals, on a busy machine one step later.
    first_step = r"\d+" if name == "SIGKILL" else f"({step + 1}|{step + 2})"
    assert re.search(f"going on from the checkpoint of step {first_step} ", again.stderr)
    expected = undisturbed("gan", *SHORT)
    check_equal(run, expected)
    assert [each["kind"] for each in journal(run)].count("superseded") <= 1
    if name == "SIGKILL":
        runs_of_own.check_metrics(run, store, expected)


@pytest.mark.slow
def test_two_ranks_of_which_one_is_killed_go_on_exactly(
    digits: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    start = runs_of_own.started(digits, tmp_path)
    given = (*SHORT, "parallel.dp_shard=2", "parallel.zero=3")
    (tmp_path / "SIGKILL-13-1").touch()
    start("gan", *given, ranks=2, code=1)
    start("gan", *given, ranks=2)
    check_equal(*runs(tmp_path), undisturbed("gan", *given, ranks=2))


def test_a_policy_goes_on_with_its_table_and_its_generators(
    digits: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Two ranks have tables and generators of their own, and one of them is killed."""
    start = runs_of_own.started(digits, tmp_path)
    (tmp_path / "SIGKILL-18-1").touch()
    start("policy", *SHORT, ranks=2, code=1)
    start("policy", *SHORT, ranks=2)
    (run,) = runs(tmp_path)
    check_equal(run, undisturbed("policy", *SHORT, ranks=2))
    said = (run / "logs").glob("terminal*rank0.log")
    assert not any("samples/s" in file.read_text() for file in said), "it has no samples"


@pytest.mark.slow
def test_one_rank_has_a_policy_for_all(
    digits: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    start, alone = runs_of_own.started(digits, tmp_path), (*SHORT, "loop.each_rank=false")
    (tmp_path / "SIGTERM-11-0").touch()
    start("policy", *alone, code=143)
    start("policy", *alone)
    check_equal(*runs(tmp_path), undisturbed("policy", *alone))
