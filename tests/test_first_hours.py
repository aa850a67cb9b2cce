"""The first hour of four people: a page is done as it stands, in an empty folder beside the clone.

A block with a title is written as a file where the reader is, the blocks of commands are given to
bash, in their order. The environment of the tests stands for `pip install`. There is no Slurm:
`-m` runs the jobs here. tests/test_docs.py checks the same commands in seconds.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import forkserver
from tests.conftest import ROOT, run_json, runs
from tests.test_docs import blocks, commands

# The runs that are there at the end, by the folder in which the page leaves them.
LEFT = {
    "start": ("runs", ["digits"]),
    "from-script": ("waves/runs", ["photos", "same", *6 * ["waves"]]),
    "own-loop": ("runs", ["gan", "gan", "pixels", "policy", "script"]),
    "finetune": ("runs", ["finetune"]),
}
TOOLS = ("bash", "cat", "dirname", "git", "mkdir", "rm", "sleep")


def script(name: str, text: str) -> str:
    """Return what a reader of the page does."""
    if name == "start":
        # The cluster needs root; tests/slurm has it. The first block installs from the network.
        text = text.partition("## A cluster on this machine")[0]
        recipes = re.findall(r"^\t@\$\(BIN\)/(python -m [hd].*digits.*)", MAKEFILE, re.M)
        prepared = "\n".join(reversed(recipes[:2]))
        text, count = re.subn(r"git clone .*?source [^\n]*", prepared, text, count=1, flags=re.S)
        assert (count, len(recipes)) == (1, 2)
    done = []
    for language, title, content in blocks(text):
        if title:
            done += [f"mkdir -p $(dirname {title})", f"cat >{title} <<'END'\n{content}END"]
        elif language == "bash":
            done.append(content)
    return "\n".join(done)


MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LEFT)
def test_a_page_is_done_as_it_stands(name: str, tmp_path: Path) -> None:
    (bin_dir := tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (bin_dir / tool).symlink_to(shutil.which(tool) or f"no {tool}")
    (empty := tmp_path / "empty").mkdir()
    page = (ROOT / "docs" / f"{name}.md").read_text()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script(name, page)],
        cwd=empty,
        env={**os.environ, "PATH": f"{sysconfig.get_path('scripts')}:{bin_dir}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder, names = LEFT[name]
    left = runs(empty / folder)
    assert sorted(run.name.partition("-")[0] for run in left) == names
    assert {run_json(run)["state"] for run in left} == {"finished"}
    if name == "from-script":
        (difference,) = re.findall(r"largest difference: (.*)", done.stdout)
        assert float(difference) < 1e-5


def test_the_cheapest_hour_in_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same commands without bash; tests/test_docs.py gives that of `plan`."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "finetune.md"
    for block in blocks(page):
        if block.title:
            Path(block.title).write_text(block.text)
    for command in commands(page):
        words = [sys.executable, *shlex.split(command)[1:]]
        if "plan" not in words:
            done = forkserver.run(words, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs(tmp_path / "runs")
    assert run_json(run)["state"] == "finished"
    assert (tmp_path / "exported" / "adapter" / "adapter_model.safetensors").is_file()
