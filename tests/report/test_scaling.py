"""Scaling series: batches before queueing, what is said, and what is left out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.insight.report import report_command
from hpctrain.insight.report.account.run_account import read
from hpctrain.insight.report.sweeps.scaling import Scaling
from tests.report.accounts import BEGIN, attempt, metrics, spent, write_run

if TYPE_CHECKING:
    from hpctrain.config.composing.compose_sweep import Composer


def test_weak_scaling_grows_the_batch_with_the_nodes(composer: "Composer") -> None:
    def batch(*overrides: str) -> int:
        config = composer.typed(["experiment=digits", *overrides])
        return config.train.global_batch_size

    assert [batch("+scaling=weak", f"launch.nodes={n}") for n in (1, 2, 4)] == [64, 128, 256]
    assert batch("+scaling=strong", "launch.nodes=4") == 64
    assert batch("+scaling=weak", "train.global_batch_size=10", "launch.nodes=3") == 30
    config = composer.typed(["experiment=digits", "+scaling=strong"])
    assert (config.scaling, config.train.max_steps, config.train.max_epochs) == (
        "strong",
        200,
        None,
    )
    with pytest.raises(ConfigError, match=r"launch.nodes=1-2: with scaling=weak each run needs"):
        batch("+scaling=weak", "launch.nodes=1-2")


def series(folder: Path, kind: str, step_ms: dict[int, float], **more: Any) -> list[Path]:
    """Write a series whose steps take so many milliseconds, by ranks."""
    found = []
    for ranks, ms in step_ms.items():
        batch = 64 * (ranks if kind == "weak" else 1)
        speed = [batch / ms * 1000] * 4
        events = [
            metrics(1, n + 1, 10 * n + 10, perf_samples_per_s=value if n else value / 10)
            for n, value in enumerate(speed)
        ]
        seconds = {"compute": 0.04 * 100 / ranks, "communication": 0.04 * (ms - 100 / ranks)}
        found.append(
            write_run(
                folder / f"{kind}-{ranks}",
                [attempt(0, 50, world_size=ranks, nodes=ranks)],
                [*events, spent(1, 50, 40, other=50 - sum(seconds.values()), **seconds)],
                config={"scaling": kind, "train": {"global_batch_size": batch}},
                **more,
            )
        )
    return found


def judged(paths: list[Path]) -> Scaling:
    found = Scaling.of(read(paths, BEGIN + 100))
    assert found is not None
    return found


def test_a_strong_series_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 10 ms serial, 90 ms parallel, 2 ms for each doubling.
    times = {n: 10 + 90 / n + 2 * k for k, n in enumerate((1, 2, 4, 8))}
    found = judged(series(tmp_path / "runs", "strong", times))
    assert found.speedup(found.points[-1]) == pytest.approx(100 / 27.25)
    assert found.efficiency(found.points[-1]) == pytest.approx(100 / 27.25 / 8)
    page = tmp_path / "page.html"
    assert report_command.main(["--dir", str(tmp_path / "runs"), "--html", str(page)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [
        "8",
        "8",
        "2,349",
        "3.67",
        "8",
        "46%,",
        "poor",
        "12.5",
        "ms",
        "14.8",
        "ms",
        "0",
        "ms",
    ] in map(str.split, shown)
    assert "speed-up" in page.read_text()


@pytest.mark.parametrize(
    ("kind", "times", "said"),
    [
        ("strong", {1: 100, 2: 51, 4: 26}, "96%, good"),
        ("weak", {1: 100, 2: 110, 4: 118}, "85%, acceptable"),
        ("weak", {1: 100, 2: 150}, "67%, poor"),
    ],
)
def test_what_is_said(tmp_path: Path, kind: str, times: dict[int, float], said: str) -> None:
    *_, last = judged(series(tmp_path, kind, times)).rows()
    assert said in [fact.text for fact in last]


def test_runs_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    paths = series(tmp_path / "a", "strong", {1: 100, 2: 60})
    paths += series(tmp_path / "b", "strong", {4: 40}, data_digest="other")
    short = write_run(
        tmp_path / "short",
        [attempt(0, 9, world_size=8)],
        [metrics(1, 1, 1, perf_samples_per_s=5.0)],
        config={"scaling": "strong", "train": {"global_batch_size": 64}},
    )
    found = judged([*paths, short])
    assert [point.ranks for point in found.points] == [1, 2]
    assert found.left_out[0] == "strong-4 cannot be compared with strong-1: the data set differ"
    assert found.left_out[1].startswith("short: 1 reports of its speed, and 3 are needed")
