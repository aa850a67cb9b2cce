"""Which runs a command line means: names, their beginnings, sweeps and folders."""

import json
import shutil
from pathlib import Path

import pytest

from hpctrain.commands import cancel, gc, resume
from hpctrain.commands import logs as logs_module
from hpctrain.commands import status as status_module
from hpctrain.commands.select import are_folders, one_run, select
from hpctrain.errors import ConfigError, StorageError
from tests.made_runs import make_run, make_sweep


def test_which_runs_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("digits-00000001", "digits-00000001.1", "digits-00000023", "text-00000002")
    one, old, two, text = (make_run(tmp_path, name) for name in names)
    sweep = make_sweep(tmp_path, "2026-01-02_03-04-05_6", [two, one, tmp_path / "gone-00000009"])
    (tmp_path / "link-00000003").symlink_to(one)
    (tmp_path / "notes").mkdir()
    assert select(tmp_path, []) == [one, two, text]
    assert select(tmp_path, [], archived=True) == [one, old, two, text]
    assert select(tmp_path, ["text"]) == [text]
    assert select(tmp_path, ["digits-00000001"]) == [one]
    assert select(tmp_path, ["digits-00000001.1", "text", "text-0"]) == [old, text]
    for name in ("2026-01-02", str(sweep), "2026-01-02_03-04-05_6"):
        assert select(tmp_path, [name, "digits-00000001"]) == [two, one]
    monkeypatch.chdir(tmp_path)
    assert select(Path("elsewhere"), ["digits-00000023"]) == [two]  # given as a path
    with pytest.raises(ConfigError, match="digits: could be digits-00000001, digits-00000023"):
        select(tmp_path, ["digits"])
    assert select(tmp_path, ["digits"], several=True) == [one, two]
    with pytest.raises(ConfigError, match="digist-0: no run or sweep"):
        select(tmp_path, ["digist-0"], several=True)
    with pytest.raises(ConfigError, match=r"digist-0: no run or sweep .* it has "):
        select(tmp_path, ["digist-0"])
    with pytest.raises(
        ConfigError, match="notes: this folder is no run and no sweep, and it holds"
    ):
        select(tmp_path, ["notes"])
    with pytest.raises(StorageError, match=r"none_such: no folder of runs .* --dir"):
        select(Path("none_such"), [])


def test_a_folder_of_runs_is_an_argument(
    tmp_path: Path,
    no_slurm: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = (make_run(tmp_path / "r", f"digits-0000000{n}") for n in (1, 2))
    make_run(tmp_path / "r", "digits-00000001.1")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert select(Path("runs"), ["r"]) == [old, new]
    assert len(select(Path("runs"), ["r"], archived=True)) == 3
    assert are_folders(["r"])
    assert not any(map(are_folders, ([], ["r", str(old)], ["runs"])))
    with pytest.raises(ConfigError, match="r: 2 runs, and logs takes one: digits-00000001, digits"):
        logs_module.main(["r"])
    assert status_module.main(["r", "--json"]) == gc.main(["r"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out.splitlines()[0])] == [
        str(old),
        str(new),
    ]
    assert cancel.main(["r"]) == resume.main(["r"]) == 0  # as with --all: nothing runs, none failed
    assert "nothing is queued or running" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="digits-00000001: gc looks through a folder of runs"):
        gc.main([str(old)])
    shutil.rmtree(new)
    assert one_run(Path("runs"), "r", "logs") == old


def test_a_sweep_whose_submission_was_cut_off_and_that_has_moved(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    tasks = tmp_path / "sweeps" / "2026" / "array-0" / "tasks"
    tasks.parent.mkdir(parents=True)
    tasks.write_text(f"/before/it/moved/{run.name}\n")
    assert select(tmp_path, ["2026"]) == [run]
