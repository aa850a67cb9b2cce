"""The container images are checked as far as possible without Apptainer and Docker."""

import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
    scripts = steps(sections["post"]) + steps(sections["test"])
    assert ran == [command.replace("{{ TORCH_INDEX }}", "$TORCH_INDEX") for command in scripts]
    assert [rest for word, rest in made if word == "ARG"] == steps(sections["arguments"])
    assert [f"export {rest}" for word, rest in made if word == "ENV"] == steps(
        sections["environment"]
    )
    (entry,) = [json.loads(rest) for word, rest in made if word == "ENTRYPOINT"]
    assert [f'exec {" ".join(entry)} "$@"'] == steps(sections["runscript"])
    (system,) = (command.split() for command in ran if command.startswith("apt-get install"))
    assert "g++" in system, "for torch.compile"
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= {*system}, "for NCCL"


@pytest.mark.parametrize("index", ["pypi", "cu126", "rocm7.2"])
def test_the_image_has_the_torch_that_was_asked_for(index: str, tmp_path: Path) -> None:
    """The commands of the definition run with a pip that only writes down its words."""
    (tmp_path / "pip").write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{tmp_path}/asked\n')
    (tmp_path / "pip").chmod(0o755)
    _, sections = definition()
    assert steps(sections["arguments"]) == ["TORCH_INDEX=pypi"]
    commands = steps(sections["post"])
    begin = next(n for n, line in enumerate(commands) if line.startswith("torch="))
    text = "\n".join(commands[begin : commands.index("rm -rf /opt/hpctrain/src")])
    for name, value in {
        "{{ TORCH_INDEX }}": index,
        "/opt/hpctrain/venv/bin": str(tmp_path),
        "/opt/hpctrain/src/pyproject.toml": str(ROOT / "pyproject.toml"),
    }.items():
        text = text.replace(name, value)
    subprocess.run(["sh", "-ec", text], check=True)
    *first, itself = (tmp_path / "asked").read_text().splitlines()
    assert itself.endswith("/opt/hpctrain/src[sample]")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (each for each in project["dependencies"] if each.startswith("torch>"))
    url = f"https://download.pytorch.org/whl/{index} {needed}"
    assert first == ([] if index == "pypi" else [f"install --no-cache-dir --index-url {url}"])


def test_the_definition_copies_what_the_wheel_needs(tmp_path: Path) -> None:
    """The names of the sections are valid, the copied files can be built, and the scripts parse."""
    header, sections = definition()
    assert set(sections) <= {
        "arguments",
        "files",
        "post",
        "environment",
        "test",
        "runscript",
        "help",
    }
    keys = [line.partition(":")[0] for line in header.splitlines() if line and line[0] != "#"]
    assert keys == ["Bootstrap", "From"]
    copied = [line.split() for line in sections["files"] if line.strip()]
    for source, target in copied:
        there = tmp_path / target.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, there)
    (install,) = [line for line in sections["post"] if "[sample]" in line]
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
