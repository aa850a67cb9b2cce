"""The runner of `make gpu`, with parts that pass, fail, hang, skip and are not there."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hpctrain.base.processes import gpu_driver
from tests.conftest import ROOT
from tests.gpu import first_minutes
from tests.gpu.first_minutes import PARTS, Part, descendants, end, main
from tests.gpu.report import TWO_GPUS
from tests.gpu.versions import versions

TESTS = """\
import pytest

def test_good(record_property):
    record_property("peak_bytes", 12)

def test_bad():
    assert False

@pytest.mark.skip(reason="torch sees no CUDA device")
def test_cuda():
    pass
"""
# It starts a process in a session of its own, as torchrun does, and hangs.
HANGS = """\
import pathlib, subprocess, sys, time

sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeps, start_new_session=True)
pathlib.Path("child.new").write_text(str(child.pid))
pathlib.Path("child.new").rename("child")
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the repository, with parts in it."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "measures.py").write_text("print('as fast')\nprint('{\"ratio\": 1.5}')\n")
    (tmp_path / "breaks.py").write_text("raise SystemExit('broken')\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytest starts faster
    monkeypatch.setattr(first_minutes, "ROOT", tmp_path)
    monkeypatch.setattr(first_minutes, "versions", lambda: {"torch": "2", "gpu": None})
    monkeypatch.setattr(first_minutes, "compile_bytecode", lambda: None)
    monkeypatch.setattr(first_minutes, "commit_of", lambda _: "abc")
    return tmp_path


def part(name: str, command: str, limit_s: float = 60, on_cpu: bool = True) -> Part:
    return Part(name, f"what {name} shows", command, 1, limit_s, on_cpu)


def test_each_part_gets_its_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = (
        part("bad", "test_it.py"),
        part("measures", "measures"),
        part("breaks", "breaks"),
        part("slow", "hangs", limit_s=0.1),
        part("absent", "tests/gpu/test_absent.py"),
        part("on a GPU only", "measures", on_cpu=False),
    )
    out = folder / "out"
    assert main(["--device", "cpu", "--out", str(out)], parts) == 1
    report = json.loads((out / "report.json").read_text())
    found = {
        each["name"]: (each["state"], each["note"].partition(" (")[0]) for each in report["parts"]
    }
    assert found == {
        "bad": ("failed", "1 of 3: test_bad"),
        "measures": ("passed", "as fast"),
        "breaks": ("failed", "broken"),
        "slow": ("timeout", "killed after 0.1 s"),
        "absent": ("missing", "tests/gpu/test_absent.py"),
        "on a GPU only": ("skipped", "no GPU"),
    }
    figures = {each["name"]: each["figures"] for each in report["parts"] if each["figures"]}
    assert figures == {"bad": {"peak_bytes": 12}, "measures": {"ratio": 1.5}}
    assert report["versions"] == {"torch": "2", "gpu": None}
    assert "assert False" in (out / "bad.log").read_text()
    said = " ".join(capsys.readouterr().out.split())
    assert all(word in said for word in ("what bad shows", "as fast", "needs two GPUs"))
    assert report["needs_two_gpus"] == list(TWO_GPUS)


def test_a_later_call_makes_what_is_left(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of other parts, commits and GPUs stay in the report."""
    parts, out = (part("good", "measures"), part("bad", "breaks")), folder / "out"

    def call(*arguments: str) -> list[tuple[str, str, str, str]]:
        main(["--device", "cpu", "--out", str(out), *arguments], parts)
        said = json.loads((out / "report.json").read_text())["parts"]
        return [(each["name"], each["state"], each["commit"], each["gpu"]) for each in said]

    first = [("good", "passed", "abc", "cpu"), ("bad", "skipped", "abc", "cpu")]
    assert call("--only", "good") == first[:1]
    capsys.readouterr()
    assert call("--budget", "0", "--resume") == first  # what has passed is not made again
    assert "it takes about 1 s, and 0 s are left" in " ".join(capsys.readouterr().out.split())
    (folder / "breaks.py").write_text("print('mended')\nprint('{}')\n")
    (folder / "measures.py").unlink()
    assert call("--resume") == [first[0], ("bad", "passed", "abc", "cpu")]
    monkeypatch.setattr(first_minutes, "commit_of", lambda _: "def")
    assert call("--resume")[2:] == [
        ("good", "missing", "def", "cpu"),
        ("bad", "passed", "def", "cpu"),
    ]
    (folder / "breaks.py").write_text("raise SystemExit('broken')\n")
    hung = (part("slow", "hangs", limit_s=0.1), part("breaks", "breaks"))
    for _ in range(2):  # what has hung does not take the time of the others once more
        capsys.readouterr()
        main(["--device", "cpu", "--out", str(out), "--resume"], hung)
    said = capsys.readouterr().out
    assert said.index("breaks: what") < said.index("slow: what")
    page = (out / "report.md").read_text()
    assert page.index("## cpu, commit def") < page.index("## cpu, commit abc")
    assert "| good | passed |" in page
    assert "| good | ratio | 1.5 |" in page


def test_a_part_is_killed_with_all_that_it_has_started(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "hangs.py"], cwd=folder, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (folder / "child").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = int((folder / "child").read_text())
    assert child in descendants(process.pid)
    end(process)
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # nobody has read its exit code yet


def test_without_a_gpu_nothing_runs_and_the_command_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--out", str(folder / "out")], (part("good", "measures"),)) == 1
    assert "no part has run: torch sees no GPU" in capsys.readouterr().out
    monkeypatch.setattr(gpu_driver, "nvidia", lambda: "550.90.07")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = versions()
    monkeypatch.setattr(first_minutes, "versions", lambda: found)
    assert main(["--out", str(folder / "out")], (part("good", "measures"),)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "which needs driver 580 or newer, not 550.90.07; `make TORCH_INDEX=cu126`" in said


def test_parts_have_names_of_their_own_and_their_files_exist() -> None:
    assert len({each.name for each in PARTS}) == len(PARTS)
    assert len({each.shows for each in PARTS}) == len(PARTS)
    for each in PARTS:
        assert each.limit_s <= 300
        assert not each.missing, each.name
    assert (ROOT / "docs" / "gpu.md").exists()
