"""Several processes may change run.json at a time."""

import subprocess
import sys
from pathlib import Path

from hpctrain.runs.run_dir import RunDir
from tests.conftest import run_json


def test_changes_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "run.json").write_text('{"state": "created", "attempts": []}')
    program = (
        "import sys; from pathlib import Path; from hpctrain.runs.run_dir import RunDir\n"
        "run = RunDir(Path(sys.argv[1]))\n"
        "for number in range(30): run.begin_attempt(who=sys.argv[2], number=number)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    writers = [subprocess.Popen([*command, who]) for who in "abc"]
    for number in range(30):
        run.update(job_id=f"7_{number}")
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    content = run_json(tmp_path)
    assert content["job_id"] == "7_29"
    assert sorted((a["who"], a["number"]) for a in content["attempts"]) == [
        (who, number) for who in "abc" for number in range(30)
    ]
