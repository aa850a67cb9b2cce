"""bash runs the script with hostile names, paths and values, and does nothing else."""

import os
import subprocess
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.cluster.slurm import steps
from hpctrain.cluster.slurm.script import sbatch_script
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, ContainerConfig, DataConfig, SiteConfig
from hpctrain.errors import ConfigError


def _is_printable(char: str) -> bool:
    return unicodedata.category(char) != "Cc"


# Text with a meaning for bash, for sbatch or for Slurm's file names.
_NASTY = (
    *("$(touch canary)", "`touch canary`", "; touch canary;", "\ntouch canary\n", "> canary"),
    *("&& touch canary", "| touch canary", "<(touch canary)", "\n#SBATCH --uid=0\n", "--wrap=x"),
    *"'\"\\# \t%*?~!-=,:()\x1b\rü😀\u2028",
    *("$HOME", "${IFS}", "\\\n", "  ", "%j", "%%", "{a,b}", "hetjob", "x" * 300),
)
_texts = st.lists(
    st.sampled_from(_NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    max_size=8,
).map(lambda parts: "".join(parts).replace("\0", ""))
# Texts for a line of a batch script, and texts for a path that Slurm writes logs to.
_lines = _texts.map(lambda text: "".join(filter(_is_printable, text))[:250])
_paths = _lines.map(lambda text: text.translate(dict.fromkeys(map(ord, "%\\:,"))))
_names = st.from_regex(r"X_[A-Za-z0-9_]{0,9}", fullmatch=True)

# This runs in place of srun. It writes its exact arguments and environment to files.
_SRUN = """\
#!/bin/bash
printf '%s\\0' "$@" >"$RECORD/arguments"
env -0 >"$RECORD/environment"
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record")
    (folder / "srun").write_text(_SRUN)
    # The loop that waits for srun must end when srun ends, and not a tenth of a second later.
    (folder / "sleep").write_text("#!/bin/bash\nexit 1\n")
    (folder / "squeue").write_text("#!/bin/bash\n")
    # The list of run directories is not where the script expects it, in a folder of the root.
    (folder / "sed").write_text(
        '#!/bin/bash\nprintf \'%s\\0\' "$@" >"$RECORD/sed arguments"\n'
        'exec /bin/sed -n "$2" "$RECORD/tasks"\n'
    )
    (folder / "mkdir").write_text('#!/bin/bash\nprintf \'%s\\0\' "$@" >"$RECORD/mkdir arguments"\n')
    for command in ("srun", "sleep", "squeue", "sed", "mkdir"):
        (folder / command).chmod(0o755)
    (folder / "here").mkdir()
    return folder


def run(script: str, record: Path) -> tuple[list[str], dict[str, str]]:
    """Run a script in bash; return the arguments and environment of srun.

    Nothing else may have happened.
    """
    here = record / "here"
    done = subprocess.run(
        ["bash"],
        input=script.encode(),
        env={
            "PATH": f"{record}:{os.environ['PATH']}",
            "HOME": str(here),
            "RECORD": str(record),
            "SLURM_ARRAY_JOB_ID": "9",
            "SLURM_ARRAY_TASK_ID": "7",
        },
        cwd=here,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), script
    assert list(here.iterdir()) == [], script
    arguments = (record / "arguments").read_bytes().decode().split("\0")[:-1]
    environment = (record / "environment").read_bytes().decode().split("\0")[:-1]
    return arguments, dict(line.split("=", 1) for line in environment)


def directives(script: str) -> Iterator[str]:
    """Yield the options that sbatch reads, which end at the first line with a command."""
    for line in script.split("\n"):
        if line and not line.startswith("#"):
            return
        if line.startswith("#SBATCH"):
            yield line.removeprefix("#SBATCH --").partition("=")[0]


# Each example starts a shell; make test-all tries more of them.
@settings(max_examples=150 if os.environ.get("HPCTRAIN_TESTS") == "all" else 50, deadline=None)
@given(
    folder=_paths,
    snapshot=_paths,
    account=_lines,
    env=st.dictionaries(_names, _texts, max_size=3),
    image=_texts,
    bind=_texts,
    argument=_texts,
)
@example("a b", "$(touch canary)", "'\"\\#", {"X_": "\ntouch canary\n"}, "`touch canary`", "", "")
@example("'; touch canary; '", "c", "$(touch canary)", {"X_": "'\\"}, "i", "$(touch canary)", "\\")
def test_nothing_happens_but_srun_with_the_right_words(
    record: Path,
    folder: str,
    snapshot: str,
    account: str,
    env: dict[str, str],
    image: str,
    bind: str,
    argument: str,
) -> None:
    output, data, code = (
        Path(f"/{root}/{name}")
        for root, name in (("runs", folder), ("data", folder), ("code", snapshot))
    )
    container = ContainerConfig("pyxis", image, binds=[bind], args=[argument])
    site = SiteConfig(
        account=account, env=env, srun=[argument], sbatch={"comment": account}, container=container
    )
    config = Config(output_dir=str(output), data=DataConfig(path=str(data)), site=site)
    array = output / "array-0"
    script = sbatch_script(JobRequest.of(config), array, 8, pythonpath=[code])
    assert list(directives(script)) == [
        *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "signal", "requeue"),
        *("account", "distribution", "comment", "array", "output", "open-mode"),
    ]
    directories = [f"{output}/{name}" for name in (*"0123456", "the run", "8")]
    (record / "tasks").write_text("".join(f"{path}\n" for path in directories))
    arguments, seen = run(script, record)
    assert (record / "sed arguments").read_text() == f"-n\0008p\0{array}/tasks\0"
    assert (record / "mkdir arguments").read_text() == f"{directories[7]}/logs\0"
    binds = [*map(str, (output, data, code)), bind]
    assert arguments == [
        "--unbuffered",
        "--open-mode=append",
        f"--output={output}/the run/logs/%A_%a.rank%t.log",
        "--kill-on-bad-exit=1",
        "--export=ALL",
        "--cpus-per-task=1",
        argument,
        f"--container-image={image}",
        "--container-mounts=" + ",".join(b if ":" in b else f"{b}:{b}" for b in binds),
        argument,
        *("/bin/sh", "-c", steps.TEXT.partition("start='")[2].partition("'")[0], "rank"),
        *(f"{output}/the run", "9_7"),
        *("python", "-u", "-m", "hpctrain", "run", f"{output}/the run"),
    ]
    assert env.items() <= seen.items()
    assert seen["PYTHONPATH"] == str(code)
    assert seen["HPCTRAIN_REQUEUE_NOTE"] == f"{output}/the run/requeue"


@settings(max_examples=300, deadline=None)
@given(folder=_texts, account=_texts)
def test_what_a_line_cannot_hold_is_refused(folder: str, account: str) -> None:
    config = Config(output_dir=f"/runs/{folder}", site=SiteConfig(account=account))
    is_safe = all(map(_is_printable, folder + account)) and not set(folder) & set("%\\")
    is_short = len(account.encode()) <= 1024
    array = Path(config.output_dir) / "array-0"
    if is_safe and is_short:
        assert (
            list(directives(sbatch_script(JobRequest.of(config), array, 1))).count("account") == 1
        )
    else:
        with pytest.raises(ConfigError, match=r"^(output_dir|site\.account)="):
            sbatch_script(JobRequest.of(config), array, 1)
