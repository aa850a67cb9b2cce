"""The Apptainer definition is checked as far as possible without Apptainer."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_the_definition_copies_what_the_wheel_needs(tmp_path: Path) -> None:
    """The names of the sections are valid, the copied files can be built, and the scripts parse."""
    header, *parts = re.split(r"^%", (ROOT / "slurm" / "hpctrain.def").read_text(), flags=re.M)
    sections = {part.partition("\n")[0]: part.partition("\n")[2].splitlines() for part in parts}
    assert set(sections) <= {"files", "post", "environment", "test", "runscript", "help"}
    keys = [line.partition(":")[0] for line in header.splitlines() if line and line[0] != "#"]
    assert keys == ["Bootstrap", "From"]
    copied = [line.split() for line in sections["files"] if line.strip()]
    for source, target in copied:
        there = tmp_path / target.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, there)
    (install,) = [line for line in sections["post"] if "pip install" in line]
    source = install.split("'")[1].partition("[")[0]
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    done = subprocess.run(
        [*command, str(tmp_path), str(tmp_path / source.lstrip("/"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("hpctrain-*.whl"))) == 1
    scripts = "\n".join(itertools.chain(sections["post"], sections["test"], sections["runscript"]))
    subprocess.run(["sh", "-n"], input=scripts, text=True, check=True)
