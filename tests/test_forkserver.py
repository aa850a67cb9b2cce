"""Tests that a fork of the tests' server behaves like `python -m MODULE` in a new process."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver

FACTS = """\
import json, os, random, signal, sys
import numpy
facts = {
    "name": __name__,
    "spec": __spec__.name,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "cwd": os.getcwd(),
    "env": {k: v for k, v in os.environ.items() if k not in ("_", "LC_CTYPE")},
    "umask": os.umask(0),
    "stdin": sys.stdin.read(),
    "encodings": [(s.encoding, s.errors) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "buffering": [
        (s.line_buffering, s.write_through, s.fileno()) for s in (sys.stdout, sys.stderr)
    ],
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
    "parent": os.getppid(),
    "leader": os.getsid(0) == os.getpid(),
    "handlers": [
        str(signal.getsignal(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    ],
}
print(json.dumps(facts))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


def write(folder: Path, name: str, program: str) -> list[str]:
    (folder / f"{name}.py").write_text(textwrap.dedent(program))
    return [sys.executable, "-m", name]


@pytest.mark.parametrize(
    ("options", "env"), [([], {}), (["-u", "-P"], {"PYTHONPATH": "HERE:/none:"})]
)
def test_a_fork_sees_what_a_new_process_sees(
    tmp_path: Path, options: list[str], env: dict[str, str]
) -> None:
    python, *words = write(tmp_path, "facts", FACTS)
    command = [python, *options, *words, "a b", "--x=ü"]
    env = {name: value.replace("HERE", str(tmp_path)) for name, value in env.items()}
    env |= {"HPCTRAIN_X": "1", "SLURM_JOB_ID": "7", "MASTER_PORT": "5"}
    env = {name: value for name, value in os.environ.items() if name != "HOME"} | env
    answers: list[Any] = []
    for run in (subprocess.run, forkserver.run):
        done = run(
            command,
            input="hello",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env,
            umask=0o027,
            start_new_session=True,
        )
        assert (done.returncode, done.stderr) == (3, "to stderr\n")
        answers.append(json.loads(done.stdout))
    assert answers[1] == answers[0]
    assert answers[1]["parent"] == os.getpid()


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import sys; sys.exit('a word')", 1, "a word\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("import atexit, sys; atexit.register(print, 'end', file=sys.stderr)", 0, "end\n"),
        (
            "import sys, threading, time\n"
            "t = lambda: (time.sleep(0.2), print('last', file=sys.stderr))\n"
            "threading.Thread(target=t).start()",
            *(0, "last\n"),
        ),
    ],
)
def test_the_end_is_that_of_a_new_process(
    tmp_path: Path, program: str, code: int, said: str
) -> None:
    command = write(tmp_path, "program", f"print('out')\n{program}")
    done = forkserver.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)
    if code != -signal.SIGTERM:  # a signal lets nothing be flushed
        assert done.stdout == "out\n"


def test_another_hpctrain_takes_the_place_of_that_of_the_server(tmp_path: Path) -> None:
    """A job runs the copy of its code, and nothing of the server's."""
    copy = tmp_path / "hpctrain"
    copy.mkdir()
    (copy / "__init__.py").touch()
    (copy / "errors.py").write_text("WHICH = 'the copy'\n")
    told = (
        "import hpctrain.errors, sys\nprint(hpctrain.errors.WHICH, 'hpctrain.cli' in sys.modules)"
    )
    (copy / "told.py").write_text(told)
    command, path = [sys.executable, "-m", "hpctrain.told"], {"PYTHONPATH": str(tmp_path)}
    for cwd, more in ((tmp_path, {}), (tmp_path.parent, path)):
        options: Any = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | more}
        with forkserver.Popen(command, cwd=cwd, **options) as process:
            assert process.communicate() == ("the copy False\n", None)
        assert process.forked


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["-c", ""], {}),
        (["-m", "this"], {"PYTHONPATH": "HERE"}),
        (["-m", "this"], {"OMP_NUM_THREADS": "2"}),
    ],
)
def test_what_a_fork_cannot_do_is_done_by_a_new_process(
    tmp_path: Path, words: list[str], env: dict[str, str]
) -> None:
    (tmp_path / "sitecustomize.py").touch()
    env = {name: value.replace("HERE", str(tmp_path)) for name, value in env.items()}
    command = [sys.executable, *words]
    with forkserver.Popen(command, env=os.environ | env, stdout=subprocess.DEVNULL) as process:
        assert not process.forked
        assert process.wait(60) == 0


def test_servers_end_with_the_tests(tmp_path: Path) -> None:
    """They end also when the test process is killed."""
    program = """\
        import os, subprocess, sys
        from tests import forkserver
        forkserver.run([sys.executable, "-m", "this"], stdout=subprocess.DEVNULL)
        print(*(s.process.pid for group in forkserver._servers.values() for s in group))
        if sys.argv[1:]:
            sys.stdout.flush()
            os.kill(os.getpid(), 9)
        """
    for kill in ([], ["kill"]):
        command = [sys.executable, "-c", textwrap.dedent(program), *kill]
        # The servers hold stderr open, so this call returns only when they have ended.
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip()
        assert done.stderr == ""
