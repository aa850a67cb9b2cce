"""The container images are checked as far as possible without Apptainer and Docker."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def definition() -> tuple[str, dict[str, list[str]]]:
    """Return the header and the sections of the Apptainer definition."""
    header, *parts = re.split(r"^%", (ROOT / "slurm" / "hpctrain.def").read_text(), flags=re.M)
    sections = {part.partition("\n")[0]: part.partition("\n")[2].splitlines() for part in parts}
    return header, sections


def steps(script: list[str]) -> list[str]:
    """Return the commands of a section, without comments."""
    return [line.strip() for line in script if line.strip() and not line.strip().startswith("#")]


def test_the_dockerfile_has_the_same_content() -> None:
    header, sections = definition()
    text = re.sub(r" \\\n\s*", " ", (ROOT / "slurm" / "Dockerfile").read_text())
    made = [line.partition(" ")[::2] for line in steps(text.splitlines())]
    (base,) = [rest for word, rest in made if word == "FROM"]
    assert f"From: {base}\n" in header
    copied = []
    for rest in (rest for word, rest in made if word == "COPY"):
        *sources, target = rest.split()
        whole = not target.endswith("/")  # a folder gets its new name, files go into a folder
        copied += [[source, target if whole else target + source] for source in sources]
    assert copied == [line.split() for line in steps(sections["files"])]
    ran = [command for word, rest in made if word == "RUN" for command in rest.split(" && ")]
    assert ran == steps(sections["post"]) + steps(sections["test"])
    assert [f"export {rest}" for word, rest in made if word == "ENV"] == steps(
        sections["environment"]
    )
    (entry,) = [json.loads(rest) for word, rest in made if word == "ENTRYPOINT"]
    assert [f'exec {" ".join(entry)} "$@"'] == steps(sections["runscript"])
    assert any("install" in command and "g++" in command for command in ran), "for torch.compile"


def test_the_definition_copies_what_the_wheel_needs(tmp_path: Path) -> None:
    """The names of the sections are valid, the copied files can be built, and the scripts parse."""
    header, sections = definition()
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
