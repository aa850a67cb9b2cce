"""The parts of the command line that have no other test."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hpctrain
from hpctrain import cli
from hpctrain.errors import ConfigError
from hpctrain.insight.reference.help import ALL
from tests.conftest import run_module


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["experiment=digits", "--version"], ["--local-rank=1", "--version"]],
)
def test_the_version_is_ours_and_not_hydras(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")  # as torch.distributed.launch sets it, beside the option
    assert cli._dispatch(arguments) == 0
    assert capsys.readouterr().out == f"hpctrain {hpctrain.__version__}\n"


@pytest.mark.parametrize(("word", "hint"), [("statsu", "did you mean status? "), ("xyzzy", "")])
def test_a_word_for_a_command_that_has_another_name(word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli._dispatch([word])
    assert str(caught.value).startswith(f"{word}: no such command; {hint}commands are status, logs")
    assert word not in cli.COMMANDS


@pytest.mark.parametrize(
    ("words", "most", "some"),
    [
        (["--help"], 40, {"train.max_steps=2000", "doctor"}),
        (["experiment=digits", "-h"], 40, {"train.max_steps=2000"}),
        (["--help", "all"], 400, {"rtx_pro_ws", "+scaling", "dry_run", "train.", "--upload"}),
        (["--help", "seed"], 30, {"seed", "int"}),
        (["--help", "perf/"], 60, {"perf/mfu_percent"}),
    ],
)
def test_the_help_fits_a_terminal(
    words: list[str], most: int, some: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._dispatch(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= most
    assert some <= {*" ".join(lines).split()}
    assert words[1:] not in ([], ["all"]) or max(map(len, lines)) <= 80


def test_all_commands_and_forms_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ALL.partition("What jobs")[0]
    for name in cli.COMMANDS:
        forms = cli.FORMS.get(name, {})
        for form in forms:
            assert re.search(rf"^  {name} (RUN )?{form} ", commands, re.M)
            with pytest.raises(SystemExit):
                cli._dispatch([name, form, "--help"])
            assert capsys.readouterr().out.startswith(f"usage: python -m hpctrain {name} {form} ")
        with pytest.raises(SystemExit):
            cli._dispatch([name, "--help"])
        said = capsys.readouterr().out
        assert all(form in said for form in forms)
    assert len(re.findall(r"^  \w", commands, re.M)) == len(cli.COMMANDS) + sum(
        map(len, cli.FORMS.values())
    )


def test_a_full_disk_below_the_output_is_one_sentence() -> None:
    command = [sys.executable, "-m", "hpctrain", "--help", "metrics"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=-1, text=True, check=False)
    said = "error: standard output: cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (6, said)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems")
def test_a_disk_that_takes_nothing_more(reference: Callable[..., Path], tmp_path: Path) -> None:
    """Numbers are shown before they are kept, and a full disk is one sentence."""
    runs, full = tmp_path / "runs", tmp_path / "full"
    for folder in (runs, full):
        folder.mkdir()
    run = reference()
    (run / "evaluations").mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", run.parent, runs], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", runs], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", full], check=True)
    try:
        done = run_module("hpctrain", "evaluate", str(runs / run.name), code=6)
        assert "accuracy" in done.stdout
        assert "the result is not kept (Read-only file system)" in done.stderr
        done = run_module("hpctrain", "export", str(run), str(full / "out"), code=6)
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", runs, full], check=True)
