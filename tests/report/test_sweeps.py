"""Reports of several runs: seeds with confidence intervals, and the page."""

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.insight.report import report_command
from hpctrain.insight.report.sweeps.seeds import estimate
from tests.report.accounts import attempt, metrics, spent, write_run

SCORES = {"0.1": (0.90, 0.92, 0.94), "0.2": (0.80, 0.81, None)}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A grid of two learning rates and three seeds, of which one run has failed."""
    folder = tmp_path / "runs"
    for lr, scores in SCORES.items():
        for seed, score in enumerate(scores):
            good = score is not None
            values = {"val_accuracy": score} if good else {}
            write_run(
                folder / f"digits-{lr}{seed}",
                [attempt(0, 100, **({} if good else {"error": "DataError: a <b>bad</b> shard"}))],
                [
                    metrics(1, 5, 10, val_accuracy=0.5),
                    spent(1, 90, 20, startup=10, compute=80),
                    metrics(1, 90, 20, train_loss=0.5, **values),
                ],
                state="finished" if good else "failed",
                result={"step": 20, "val/accuracy": score} if good else None,
                swept=[f"optimizer.lr={lr}", f"seed={seed}"],
            )
    return folder


def report(*argv: Any) -> None:
    assert report_command.main([*map(str, argv)]) == 0


def test_the_best_runs_and_what_failed(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report("--dir", sweep)
    shown = capsys.readouterr().out
    assert shown.startswith("6 runs\n")
    assert re.search("allocated +10 min\n", shown)
    assert re.search(r"digits-0\.12 +0\.94 +0\.1 +2", shown)
    assert re.search("digits-0.22 .* failed: DataError: a <b>bad</b> shard", shown)


def test_a_result_that_may_be_worth_nothing_has_its_note(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "val/accuracy is 0.1, no better than always saying the most frequent class (0.1)"
    for name in ("digits-0.20", "digits-0.22"):
        record = json.loads((sweep / name / "run.json").read_text())
        note = {"topic": "chance", "text": text, "step": 20, "about": ""}
        (sweep / name / "run.json").write_text(json.dumps(record | {"notes": [note]}))
    report("--dir", sweep, "--html", tmp_path / "a.html")
    # The other one has failed, so that its note stands in its reason.
    assert f"  * digits-0.20: {text}\n" in capsys.readouterr().out
    assert f"<li>digits-0.20: {text}</li>" in (tmp_path / "a.html").read_text()


def test_seeds_become_a_table(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report("--dir", sweep, "--over", "seed")
    shown = capsys.readouterr().out
    # t(0.975, 2) = 4.3027 and t(0.975, 1) = 12.7062, from a printed table.
    half = 4.3027 * 0.02 / 3**0.5
    assert estimate([0.90, 0.92, 0.94]).half == pytest.approx(half, rel=1e-4)
    assert estimate([0.80, 0.81]).half == pytest.approx(12.7062 * 0.005, rel=1e-4)
    assert re.search(r"0\.1 +0\.920 ± 0\.050 \(s 0\.020\) +3", shown)
    assert re.search(r"0\.2 +0\.805 ± 0\.064 \(s 0\.007\) +2", shown)
    assert re.search(r"digits-0\.22 +lr=0\.2 seed=2 +failed: DataError", shown)
    report("--dir", sweep, "--over", "seed", "--json")
    first, second = json.loads(capsys.readouterr().out)["settings"]
    assert (first["metrics"]["val/accuracy"]["n"], len(second["runs"])) == (3, 2)
    assert first["metrics"]["val/accuracy"]["half"] == pytest.approx(half, rel=1e-4)
    assert [*second["missing"]] == ["digits-0.22"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--over", "batch"], "--over batch: this key was not swept; the swept keys are optimizer"),
        (["--over", "seed", "--metric", "val/f1"], "--metric val/f1: no run has a value of it; "),
        (["--metric", "val/f1"], "--metric val/f1: no run has a value of it; they have "),
        (["--html", "nowhere/page.html"], "nowhere/page.html: no file can be written there"),
    ],
)
def test_bad_input(sweep: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        report_command.main(["--dir", str(sweep), *argv])


class Page(html.parser.HTMLParser):
    """The tags of a page, and every address that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.loads += [given[name] or "" for name in ("src", "href", "xlink:href") if name in given]


def test_the_page_is_one_file_without_scripts(sweep: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    report("--dir", sweep, "--over", "seed", "--html", file)
    text = file.read_text()
    page = Page(text)
    assert {"script", "link", "iframe", "b"}.isdisjoint(page.tags)
    assert page.tags.count("figure") == 1
    assert all(address.startswith("#") for address in page.loads)
    assert "@import" not in text
    assert "&lt;b&gt;bad&lt;/b&gt;" in text
    assert len(text) < 1_000_000


def test_json_lists_every_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report("--dir", sweep, "--json")
    found = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in found] == ["finished"] * 5 + ["failed"]
    for each in found:
        parts = sum(value for name, value in each["time"].items() if name != "allocated")
        assert parts == pytest.approx(each["time"]["allocated"]) == 100
