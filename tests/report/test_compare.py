"""compare: what differs between two runs, and the first step at which they part."""

import json
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.insight.report import report_command
from tests.report.accounts import attempt, metrics, write_run


def write_pair(folder: Path) -> None:
    for name, losses, version in (
        ("a-1", (1.0, 0.5, 0.25), "2.1"),
        ("b-1", (1.0, 0.5, 0.2), "2.2"),
    ):
        events = [metrics(1, 1 + n, 10 * n, train_loss=loss) for n, loss in enumerate(losses)]
        run = write_run(
            folder / name,
            [attempt(0, 10)],
            [*events, metrics(1, 9, 15, val_loss=float(name == "a-1"))],
            config={"seed": 0, "optimizer": {"lr": 0.1 if name == "a-1" else 0.2}},
            data_digest=name,
        )
        (run / "provenance").mkdir()
        (run / "provenance" / "packages.txt").write_text(f"# Python 3.12.1 x\nnumpy=={version}\n")
        tree = {"path": "/home/me/code", "commit": name * 10, "branch": "main"}
        (run / "provenance" / "git.json").write_text(json.dumps([tree]))
        (run / "provenance" / "code.diff").write_text(f"+lr = {version}\n")


def test_everything_that_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pair(tmp_path)
    assert report_command.main(["--compare", "a", "b", "--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "optimizer.lr" in shown
    assert "seed" not in shown
    assert "commit a-1a-1a-1a (main) and b-1b-1b-1b (main)" in shown
    assert "code: the changes that are not committed differ: `diff " in shown
    assert "other contents: a-1 and b-1" in shown
    assert "numpy" in shown
    assert "Python" not in shown
    assert "The runs part at step 15: val/loss is 1 and 0." in shown
    report_command.main(["--compare", "a", "b", "--dir", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(each["metric"], each["step"]) for each in found["partings"]] == [
        ("val/loss", 15),
        ("train/loss", 20),
    ]


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    write_pair(tmp_path)
    config = tmp_path / "b-1" / "config.yaml"
    whole = config.read_text()
    config.write_text(whole + "metric: again\n")
    with pytest.raises(
        ConfigError, match=r"b-1 cannot be compared: .*yaml: line 5: the key metric"
    ):
        report_command.main(["--compare", "a", "b", "--dir", str(tmp_path)])
    config.write_text(whole)
    with pytest.raises(ConfigError, match="it takes two runs, and got a-1"):
        report_command.main(["--compare", "a", "a", "--dir", str(tmp_path)])
    (tmp_path / "b-1" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"b-1 cannot be compared: .*run.json is damaged"):
        report_command.main(["--compare", "a", "b", "--dir", str(tmp_path)])
