"""Tests of what chooses the runs of `-m`: Hydra's basic sweeper with glob and range, and Optuna."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hpctrain.cli import main
from hpctrain.search.space import distribution
from tests.conftest import Completed, process_kept

Train = Callable[..., Completed]
SMALL = ("train.max_steps=2", "launch.snapshot=off", "tracking=off")
SEARCH = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", *SMALL)


@pytest.fixture
def dry_run(
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Train]:
    """Run `hpctrain ARGUMENTS launch.dry_run=true` in this process, without starting Python.

    With `dry=False` it is `hpctrain ARGUMENTS`.
    """

    def call(*arguments: str, code: int = 0, dry: bool = True) -> Completed:
        where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
        where += ["launch.dry_run=true"] * dry
        monkeypatch.setattr(sys, "argv", ["hpctrain", *arguments, *where])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert end.value.code == code, said.err
        return Completed(sys.argv, code, said.out, said.err)

    monkeypatch.chdir(tmp_path)
    with process_kept():
        yield call


def proposed(done: Completed, key: str) -> list[str]:
    """Return the value of a key for each run of a dry run; empty where all runs have the same."""
    return re.findall(rf"(?<![\w./]){re.escape(key)}=([^\s│]+)", done.stderr)


@pytest.mark.parametrize("more", [[], ["seed=1,2"]])
def test_a_config_whose_mode_is_multirun_needs_no_m(
    more: list[str], dry_run: Train, tmp_path: Path
) -> None:
    mine = tmp_path / "conf" / "experiment" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(
        "# @package _global_\ndefaults: [digits, _self_]\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {optimizer.lr: '1e-3,1e-2'}}}\n"
    )
    done = dry_run("--config-dir", "conf", "experiment=mine", *more, *SMALL)
    assert proposed(done, "optimizer.lr") == [
        lr for lr in ("0.001", "0.01") for _ in range(2 if more else 1)
    ]


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("seed=range(6,0,-2)", ["6", "4", "2"]),
        ("seed=sort(3,1,2,reverse=true)", ["3", "2", "1"]),
        ("precision=glob(fp*,exclude=*6)", ["fp32", "fp64", "fp8"]),
        ("model.hidden=[8],[16,16]", ["[8]", "[16,16]"]),
    ],
)
def test_the_basic_sweeper_takes_hydras_words(
    dry_run: Train, tmp_path: Path, sweep: str, values: list[str]
) -> None:
    done = dry_run("experiment=digits", "-m", sweep)
    assert proposed(done, sweep.partition("=")[0]) == values
    assert f"--array=0-{len(values) - 1}" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_shuffling_changes_the_order_only(dry_run: Train) -> None:
    done = dry_run("experiment=digits", "-m", "seed=shuffle(range(0,6))")
    assert sorted(proposed(done, "seed")) == list("012345")


def test_an_experiment_of_ones_own_is_globbed_too(dry_run: Train, tmp_path: Path) -> None:
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for name in ("small", "large"):
        (folder / f"mine_{name}.yaml").write_text(
            f"# @package _global_\ndefaults: [digits, _self_]\nname: {name}\n"
        )
    given = ["-m", "--config-dir", f"{tmp_path}/conf", "experiment=glob(mine_*)", "seed=1,2"]
    done = dry_run(*given)
    assert proposed(done, "experiment") == ["mine_large"] * 2 + ["mine_small"] * 2
    # The names differ, so there are two arrays.
    assert done.stdout.count("--array=0-1") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hydra.sweeper.direction=null"], "hydra.sweeper.direction=None: minimize or maximize"),
        (["seed=tag(log,interval(-1,1))"], "seed=tag(log,interval(-1,1)): "),
        (
            ["hydra.sweeper.rungs=[1,3]"],
            "hydra.sweeper.rungs=[1, 3]: 3 is beyond train.max_steps=2",
        ),
        (["launch.nodes=1,2"], "launch.nodes: a search cannot vary it, because a worker has it"),
        (["data.val_split=null"], "metric=val/accuracy: did you mean train/accuracy? this run"),
        (["seed=3", "hydra.sweeper.params={}"], "has nothing to search"),
    ],
)
def test_a_wrong_search_writes_nothing(
    dry_run: Train, tmp_path: Path, arguments: list[str], message: str
) -> None:
    default = [] if any(text.startswith("seed") for text in arguments) else ["seed=range(0,3)"]
    done = dry_run("experiment=digits", *SEARCH, *default, *arguments, code=2, dry=False)
    assert f"error: {message}" in done.stderr.replace("hydra/sweeper=optuna ", "", 1)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_search_shows_what_it_would_submit(dry_run: Train, tmp_path: Path) -> None:
    space = {
        "optimizer.lr=tag(log,interval(1e-4,1e-1))": FloatDistribution(1e-4, 1e-1, log=True),
        "model.dropout=interval(0,0.5)": FloatDistribution(0, 0.5),
        "model.hidden=choice([64],[256,256])": CategoricalDistribution(["[256,256]", "[64]"]),
        "seed=range(0,5)": IntDistribution(0, 4),  # Hydra's range ends before 5
        "train.accumulate=int(interval(1,2))": IntDistribution(1, 2),
    }
    parsed = OverridesParser.create().parse_overrides([*space])
    assert [*map(distribution, parsed)] == [*space.values()]
    more = ("scheduler=glob(co*)", "hydra.sweeper.n_jobs=8")
    done = dry_run("experiment=digits", *SEARCH, *space, *more)
    assert "--array=0-7" in done.stdout
    assert not (tmp_path / "runs").exists()
