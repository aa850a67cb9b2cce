"""What is submitted for a run with a chain; sbatch and scontrol are stand-ins."""

import json
import os
from pathlib import Path

import pytest

from hpctrain.config.schema import Config, DataConfig, LaunchConfig
from hpctrain.launch import arrays
from hpctrain.launch.entry import Entry
from hpctrain.runs.run_dir import RunDir

SBATCH = """#!/bin/sh
echo x >>{folder}/asked
case $(wc -l <{folder}/asked) in
1) echo 7 ;;
2) echo 8 ;;
*) echo 'sbatch: error: AssocMaxSubmitJobLimit' >&2; exit 1 ;;
esac
"""


def test_a_chain_is_an_array_for_each_run_with_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in {
        "sbatch": SBATCH.format(folder=tmp_path),
        "scontrol": "#!/bin/sh\nexit 1",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = Config(
        name="digits",
        output_dir=str(tmp_path),
        data=DataConfig(path="/data"),
        launch=LaunchConfig(chain=3, max_running=1),
    )
    entries = [Entry([], config, RunDir(tmp_path / each / "digits-1")) for each in ("a", "b")]
    for entry in entries:
        entry.run.path.mkdir(parents=True)
    # A run that is resumed has measured its steps and saves.
    measured = {"version": 1, "stop_s": 100.0}
    (entries[0].run.path / "progress.json").write_text(json.dumps(measured))
    first, second = arrays.plan(entries, tmp_path / "sweep", 1000)
    (first.folder / "batch").mkdir(parents=True)
    first.submit([])
    assert (first.folder / "job_id").read_text() == "7\n8\n"
    assert "launch.chain: 2 of 3 jobs queued: sbatch refused" in caplog.text
    assert (entries[0].job, entries[0].behind) == ("7_0", ["8_0"])
    texts = first.text(), second.text()
    for text in texts:
        assert "#SBATCH --array=0-0%1\n" in text
    assert "#SBATCH --dependency=singleton\n" in texts[0]
    assert "#SBATCH --dependency=afterany:7:8,singleton\n" in texts[1]
    names = [line for text in texts for line in text.splitlines() if "--job-name=digits-1-" in line]
    assert len({*names}) == 2  # two runs of one name, in two folders
    assert "#SBATCH --signal=USR2@230\n" in texts[0]
    assert "export HPCTRAIN_LEAD_S=230 HPCTRAIN_GRACE_S=\n" in texts[0]
    assert "#SBATCH --signal=USR2@120\n" in texts[1]
