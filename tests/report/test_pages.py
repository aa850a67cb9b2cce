"""The pages of runs and sweeps: what they begin with, why attempts ended, and their charts."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpctrain.insight.report import report_command, sweep_tree
from hpctrain.insight.report.account.run_account import RunAccount, read
from hpctrain.insight.report.run_tree import sentence
from hpctrain.insight.report.sweeps.parameters import SweptRuns
from hpctrain.insight.report.sweeps.seeds import settings
from hpctrain.insight.report.tree import Chart
from hpctrain.insight.report.views import charts, html_view
from tests.report.accounts import BEGIN, account, attempt, metrics, write_run


def drawn(chart: Chart) -> Axes:
    """Return the axes on which a chart is drawn."""
    axes = Figure().add_subplot()
    chart.draw(axes)
    return axes


def node_run(folder: Path) -> Path:
    """Write a run of two nodes: killed, preempted, finished; nothing is measured in between."""

    def sensor(**gpus: float) -> list[dict[str, Any]]:
        times = [*range(0, 100, 10), *range(200, 300, 10)]
        names = {f"gpu_{gpu[3:]}_utilization_percentage": value for gpu, value in gpus.items()}
        values = names | {"cpu_utilization_percentage": 100 - max(gpus.values())}
        return [{"time": BEGIN + time, "metrics": values} for time in times]

    (folder / "artifacts").mkdir(parents=True)
    (folder / "artifacts" / "model.txt").write_text("model MLP: 85,002 parameters\n  layer\n")
    (folder / "provenance").mkdir()
    (folder / "provenance" / "git.json").write_text(
        '[{"path": "/x/repo", "commit": "abc123", "dirty": true, "remote": "host:repo"}]'
    )
    dataset = {"kind": "dataset", "attempt": 1, "time": BEGIN, "name": "digits", "source": "/d"}
    dataset |= {"context": "training", "fields": {}}
    nodes: dict[str, Any] = {"world_size": 2, "nodes": 2, "launcher": "torchrun"}
    return write_run(
        folder,
        [
            attempt(0, hosts=[], host="n1", **nodes),
            attempt(100, 200, first_step=4, hosts=[], reason="SIGTERM", **nodes),
            attempt(200, 300, first_step=8, hosts=[], **nodes)
            | {"environment": {"torch": "2.9", "hpctrain": "0.1"}},
        ],
        [
            dataset | {"samples": {"train": 1415, "val": 382}, "digest": "d"},
            *(metrics(1, 10 * n, n, val_accuracy=0.90 + n / 100) for n in range(1, 10)),
            *(metrics(1, 10 * n, n, perf_evaluation_s=n, best_step=n) for n in (1, 2)),
            metrics(3, 290, 12, val_accuracy=0.97, perf_step_ms_p50=3.0),
            metrics(3, 295, 13, val_accuracy=0.97, perf_step_ms_p50=4.0),
        ],
        sensors={"n2": sensor(gpu0=90.0, gpu1=80.0), "n1": sensor(gpu0=10.0)},
        overrides=["experiment=digits", "name=a b", "tracking.uri=http://me:hunter2@host"],
        config_dir="/my configs",
    )


def test_a_page_says_what_the_run_is_and_how_it_stands(tmp_path: Path) -> None:
    run = node_run(tmp_path / "run-1")
    best = {"metric": "val/accuracy", "best": {"value": 0.99, "step": 9}}
    (run / "progress.json").write_text(json.dumps(best))
    assert report_command.main([str(run), "--html", str(tmp_path / "a.html")]) == 0
    page = (tmp_path / "a.html").read_text()
    begin = page.index("The run is finished after 13 steps in 5 min and 3 attempts; val/accuracy")
    assert "is 0.97, and was best at step 9 with 0.99." in page[begin:]
    for text in (
        "hpctrain --config-dir &#x27;/my configs&#x27; experiment=digits &#x27;name=a b&#x27;",
        "MLP: 85,002 parameters",
        "/d (1,415 train, 382 val samples)",
        "host:repo at <code>abc123</code>, with changes that are not committed",
        "torch 2.9, hpctrain 0.1",
        "n1, n2 (2 ranks, launcher torchrun)",
        f'<a href="{(run / "logs").as_uri()}">',
        '<td data-name="why it ended">no end was recorded</td>',  # on a phone the name is shown
        '<td data-name="why it ended">SIGTERM</td>',
    ):
        assert text in page, text
    assert "hunter2" not in page
    drawn = re.findall(r'<svg role="img" aria-label="([^"]*)"', page)
    assert drawn == ["val/accuracy", "perf/step_ms_p50"]
    assert page.index("<h1>") < begin < page.index("<dl>") < page.index("Where the time went")


@pytest.mark.parametrize(
    ("state", "facts", "said"),
    [
        ("failed", {"error": "ValueError: <b>"}, "has failed after 3 steps in 1 min: ValueError: "),
        ("interrupted", {"reason": "SIGTERM", "step": 3}, "was stopped after 3 steps in 1 min: sa"),
        ("finished", {"reason": "early stopping"}, "is finished after 3 steps in 1 min: early st"),
        ("created", None, "has not begun."),
    ],
)
def test_a_run_in_one_sentence(
    tmp_path: Path, state: str, facts: dict[str, Any] | None, said: str
) -> None:
    attempts = [] if facts is None else [attempt(0, 95, **facts) | {"state": state}]
    events = [metrics(1, 90, 3, train_loss=math.nan)] if attempts else []
    text = sentence(account(write_run(tmp_path / "run", attempts, events, state=state)))
    assert said in text.replace("2 min", "1 min")
    assert text.startswith("The run ")
    assert "nan" not in text


def grid(folder: Path, by_one: bool, metric: str = "val/accuracy") -> list[RunAccount]:
    """Return the runs of two rates and three seeds; one by one, or of a sweep."""
    paths = []
    for lr, scores in {"0.1": (0.5, 0.6, 0.7), "0.010": (0.97, 0.98, 0.999)}.items():
        for seed, score in enumerate(scores):
            swept = [f"optimizer.lr={lr}", f"seed={seed}"]
            given = {"overrides": ["experiment=digits", *swept[: 1 if by_one and not seed else 2]]}
            run = write_run(
                folder / f"d-{lr}{seed}",
                [attempt(0, 100)],
                [metrics(1, 50, n, **{metric: score - 0.1 / n}) for n in (1, 9)],
                result={"step": 9, metric: score},
                config={"seed": seed, "optimizer": {"lr": float(lr), "kind": "adamw"}},
                **given,
                **({} if by_one else {"swept": swept, "sweep": {"uid": "s"}}),
            )
            paths.append(run)
    return read(paths, BEGIN)


@pytest.mark.parametrize("by_one", [True, False])
def test_runs_however_started_are_a_sweep_with_seeds(tmp_path: Path, by_one: bool) -> None:
    accounts = grid(tmp_path, by_one)
    found = settings(accounts, "seed", ["val/accuracy"])
    rate = "0.01" if by_one else "0.010"  # what the config has, or what was swept
    assert [each.values for each in found] == [{"optimizer.lr": rate}, {"optimizer.lr": "0.1"}]
    sweep = SweptRuns.of(accounts)
    assert sorted(sweep.keys) == ["optimizer.lr", "seed"]
    axes = drawn(charts.sweep_chart(sweep))
    assert axes.get_ylabel() == "higher is better"
    assert len(axes.get_legend_handles_labels()[1]) == 6
    assert axes.get_xlabel()
    page = html_view.page("6 runs", sweep_tree.tree(accounts, sweep, found, None, None))
    answer = re.search(r"<h1>.*?</h1>\n(.*?)<h2>", page, re.S)
    assert answer is not None
    for text in (
        f"The best of 6 runs is <code>d-0.0102</code> (lr={rate} seed=2): val/accuracy is 0.999.",
        "<code>python -m hpctrain experiment=digits optimizer.lr=0.010 seed=2</code>",
    ):
        assert text in answer[1], text


@pytest.mark.parametrize(
    ("metric", "best"), [("val/accuracy", "0.01"), ("val/loss", "0.1"), ("val/width", "0.01")]
)
def test_runs_and_settings_have_one_order(tmp_path: Path, metric: str, best: str) -> None:
    """Also those of a metric whose name does not tell a direction: more is better then."""
    accounts = grid(tmp_path, by_one=True, metric=metric)
    assert settings(accounts, "seed", [metric])[0].values == {"optimizer.lr": best}
    assert SweptRuns.of(accounts, metric).finished[0].swept["optimizer.lr"] == best
