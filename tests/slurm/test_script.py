"""Tests of the sbatch script: its text, and what it does when bash runs it."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster.slurm import steps
from hpctrain.cluster.slurm.container import CHOOSE_GPUS, in_container, shell_words
from hpctrain.cluster.slurm.job_environment import clean_environment
from hpctrain.cluster.slurm.script import JobOrder, sbatch_script
from hpctrain.config.composing.compose import compose as compose_config
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, ContainerConfig, DataConfig, LaunchConfig, SiteConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from tests.conftest import ROOT

FOLDER = Path("/runs/my sweep/array-0")
AGAIN = ["scontrol update JobId=9_0 Requeue=1", "scontrol requeue 9_0"]


def config(site: SiteConfig | None = None, **launch: Any) -> Config:
    return Config(
        name="digits",
        output_dir="/runs",
        data=DataConfig(path="/data/digits"),
        launch=LaunchConfig(**launch),
        site=site or SiteConfig(),
    )


def script(site: SiteConfig | None = None, **launch: Any) -> str:
    return sbatch_script(JobRequest.of(config(site, **launch)), FOLDER, 1)


def directives(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line}


def srun_words(text: str) -> list[str]:
    command, _, _ = text[text.index("    exec srun ") :].partition("\n}")
    return command.replace("\\\n", " ").split()


def run_in_bash(
    text: str, folder: Path, srun: str = "exit 0", **commands: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in bash; `srun` and so on replace the real commands.

    The first line of the list of run directories is `a run` in the folder.
    """
    (folder / "a run" / "logs").mkdir(parents=True)
    commands = {"sed": f"[[ $2 == 1p ]] && echo '{folder}/a run'"} | commands
    folder_of_commands = folder / "bin"
    folder_of_commands.mkdir()
    for name, line in {"srun": srun, **commands}.items():
        (folder_of_commands / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder_of_commands / name).chmod(0o755)
    path = f"{folder_of_commands}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", text],
        env=os.environ | {"PATH": path, "SLURM_ARRAY_TASK_ID": "0"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_says_what_was_asked() -> None:
    site = SiteConfig(
        partition="gpu",
        account="my-project",
        sbatch={
            "exclusive": True,
            "propagate": "NONE",
            "nice": 10,
            "hint": None,
            "reservation": 'my "reservation" #1',
            "mail_type": "FAIL,ARRAY_TASKS",
        },
        srun=["--cpu-bind=cores", "--mpi=none"],
    )
    text = sbatch_script(
        JobRequest.of(
            config(site, nodes=2, tasks_per_node=2, gpus_per_node=4, cpus_per_task=3, time_min=90)
        ),
        FOLDER,
        5,
        order=JobOrder(2, "afterany:123"),
    )
    assert directives(text) == {
        "--job-name=digits",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--gpus-per-node=4",
        "--time=90",
        "--signal=USR2@120",
        "--requeue",
        "--partition=gpu",
        "--account=my-project",
        '--reservation="my \\"reservation\\" #1"',
        "--distribution=block:block",
        "--mail-type=FAIL,ARRAY_TASKS",
        "--exclusive",
        "--propagate=NONE",
        "--nice=10",
        "--array=0-4%2",
        "--dependency=afterany:123",
        '--output="/runs/my sweep/array-0/batch/%A_%a.log"',
        "--open-mode=append",
    }
    words = srun_words(text)
    for word in ("--cpus-per-task=3", "--gpus-per-node=4", "--cpu-bind=cores", "--mpi=none"):
        assert word in words
    listed = "sed -n \"$((SLURM_ARRAY_TASK_ID + 1))p\" '/runs/my sweep/array-0/tasks'"
    assert f"run=$({listed})" in text.splitlines()
    assert words[-6:] == [sys.executable, "-u", "-m", "hpctrain", "run", '"$run"']


def ranged(nodes: str, site: SiteConfig | None = None, **launch: Any) -> Config:
    made = config(site, nodes=nodes, **launch)
    made.train.global_batch_size = 64
    return made


@pytest.mark.parametrize(("given", "used", "warned"), [(4, 4, False), (7, 4, True), (8, 8, False)])
def test_a_range_of_nodes(given: int, used: int, warned: bool, tmp_path: Path) -> None:
    made = ranged("3-9", tasks_per_node=2, cpus_per_task=3, gpus_per_node=2)
    text = sbatch_script(JobRequest.of(made), tmp_path, 1)
    asked = {"--nodes=4-8", "--mincpus=6", "--cpus-per-task=3", "--gpus-per-node=2"}
    assert asked < directives(text)
    assert not any("ntasks" in line for line in directives(text))
    done = run_in_bash(f"SLURM_JOB_NUM_NODES={given}\n{text}", tmp_path, 'echo "$@"')
    words = done.stdout.split()
    started = {f"--nodes={used}", f"--ntasks={2 * used}", "--ntasks-per-node=2"}
    assert started < {*words}
    message = f"of {given} nodes only {used} are used: launch.nodes=3-9, and 4, 8 fit"
    assert (message in done.stderr) == warned


def test_a_range_in_which_all_numbers_fit_warns_of_nothing() -> None:
    assert "warning" not in sbatch_script(JobRequest.of(ranged("1-2")), FOLDER, 1)
    asked = ranged("1-2", SiteConfig(gpu_option="gpus-per-task"), gpus_per_node=1)
    with pytest.raises(ConfigError, match=r"site\.gpu_option=gpus-per-task with launch\.nodes=1-2"):
        sbatch_script(JobRequest.of(asked), FOLDER, 1)


@pytest.mark.parametrize(
    ("option", "asked"),
    [
        ("mem", {"--mem=1536M"}),
        ("mem-per-cpu", {"--mem-per-cpu=256M"}),
        ("mem-per-gpu", {"--mem-per-gpu=768M"}),
        ("none", set()),
    ],
)
def test_memory_as_the_site_wants_it(option: str, asked: set[str]) -> None:
    site = SiteConfig(memory_option=option)
    shape = {"tasks_per_node": 2, "cpus_per_task": 3, "gpus_per_node": 2}
    text = script(site, mem_gb=1.5, **shape)
    assert {line for line in directives(text) if "mem" in line} == asked
    everything = {line for line in directives(script(site, mem_gb=0, **shape)) if "mem" in line}
    assert everything == ({"--mem=0"} if asked else set())
    assert "mem" not in script(site, mem_gb=None, **shape)


def test_memory_by_the_gpu_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"site\.memory_option=mem-per-gpu.*launch\.mem_gb=2"):
        script(SiteConfig(memory_option="mem-per-gpu"), mem_gb=2)


@pytest.mark.parametrize(
    ("option", "kind", "asked", "step"),
    [
        ("gpus-per-node", None, ["--gpus-per-node=4"], "--gpus-per-node=4"),
        ("gpus-per-node", "a100", ["--gpus-per-node=a100:4"], "--gpus-per-node=a100:4"),
        ("gres", None, ["--gres=gpu:4"], "--gres=gpu:4"),
        ("gres", "a100", ["--gres=gpu:a100:4"], "--gres=gpu:a100:4"),
        ("gpus-per-task", "a100", ["--gpus-per-task=a100:2"], "--gpus-per-node=a100:4"),
        ("srun", None, [], "--gres=gpu:4"),
    ],
)
def test_gpus_as_the_site_wants_them(
    option: str, kind: str | None, asked: list[str], step: str
) -> None:
    text = script(SiteConfig(gpu_option=option, gpu_type=kind), tasks_per_node=2, gpus_per_node=4)
    assert [line for line in directives(text) if "gpu" in line] == asked
    assert [word for word in srun_words(text) if "gpu" in word] == [step]
    # srun would read the request for each task from the environment of the job.
    assert ("\nunset SLURM_GPUS_PER_TASK " in text) == (option == "gpus-per-task")


def test_other_gres_stand_beside_the_gpus() -> None:
    for option, asked in (("gres", "--gres=gpu:a100:1,nvme:950"), ("none", "--gres=nvme:950")):
        site = SiteConfig(gpu_option=option, gpu_type="a100", sbatch={"gres": "nvme:950"})
        lines = directives(script(site, gpus_per_node=1))
        assert {line for line in lines if "gres" in line or "gpu" in line} == {asked}
    site = SiteConfig(gpu_option="gres", sbatch={"gres": "gpu:2"})
    with pytest.raises(ConfigError, match=r"sbatch\.gres=gpu:2: use launch\.gpus_per_node"):
        script(site, gpus_per_node=1)


def test_a_site_places_ranks_in_its_own_way() -> None:
    assert "--distribution=block:block" in directives(script())
    assert "distribution" not in script(SiteConfig(sbatch={"distribution": None}))
    own = SiteConfig(sbatch={"distribution": "block:cyclic"})
    assert [each for each in directives(script(own)) if "dist" in each] == [
        "--distribution=block:cyclic"
    ]


def test_no_gpus_are_asked_for_where_they_come_unasked() -> None:
    assert "gpu" not in script(SiteConfig(gpu_option="none"), gpus_per_node=4)
    assert "gpu" not in script(SiteConfig(gpu_option="gres"), gpus_per_node=0)


@pytest.mark.parametrize(
    ("site", "said"),
    [
        (SiteConfig(sbatch={"nodes": 3}), "site.sbatch.nodes=3: use launch.nodes"),
        (SiteConfig(sbatch={"no-kill": True}), "site.sbatch.no-kill=True: use launch.spares"),
        (SiteConfig(sbatch={"cpus_per_task": 2}), "use launch.cpus_per_task for this option"),
        (SiteConfig(sbatch={"output": "x"}), "the logs are in the run directory"),
        (SiteConfig(sbatch={"no-requeue": True}), "the script sets --no-requeue itself"),
        (SiteConfig(sbatch={"p": "gpu"}), "site.sbatch.p=gpu: give the long name of an option"),
        (SiteConfig(sbatch={"gpu-bind": "single:1"}), "each rank would see its own GPU only"),
        (SiteConfig(srun=["--gpu-bind=single:1"]), "site.srun: --gpu-bind=single:1: each rank"),
        (SiteConfig(sbatch={"comment": ["a"]}), "site.sbatch.comment=['a']: text, a number"),
        (SiteConfig(account="a\n#SBATCH --uid=0"), r"site.account='a\n#SBATCH --uid=0': '\n'"),
        (SiteConfig(sbatch={"comment": "x" * 1025}), "1025 bytes, but Slurm takes 1024"),
        (SiteConfig(env={"A B": "x"}), "site.env.A B='x': not a variable"),
    ],
)
def test_what_cannot_be_said_to_slurm_is_refused(site: SiteConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        script(site)


@pytest.mark.parametrize("part", ["100%", "a\\b", "a\nb", "a\x1bb"])
def test_folders_that_slurm_would_misread_are_refused(part: str) -> None:
    asked = replace(config(), output_dir=f"/runs/{part}")
    with pytest.raises(ConfigError, match=r"^output_dir="):
        sbatch_script(JobRequest.of(asked), Path(asked.output_dir) / "array-0", 1)


def test_what_only_a_shell_understands_is_refused() -> None:
    asked = config(SiteConfig(env={"TMP": "${TMPDIR}/x", "GOOD": "a$(b) c$"}))
    asked.output_dir, asked.tracking.uri = "$SCRATCH/runs", "sqlite:///$SCRATCH/m.db"
    asked.data.stage_dir, asked.data.path = "~/copies", "/here/~/digits"
    asked.train.max_steps, asked.data.val_sets = 1, [{"name": "b", "path": "$B"}]
    with pytest.raises(ConfigError) as refused:
        validate(asked)
    said = re.findall(r"^(\S+)=\S+: no shell reads it.* write (\S+?);?$", str(refused.value), re.M)
    scratch = "${oc.env:SCRATCH}"
    assert said == [
        ("output_dir", scratch),
        ("data.path", "${oc.env:HOME}"),
        ("data.val_sets[0].path", "${oc.env:B}"),
        ("data.stage_dir", "${oc.env:HOME}"),
        ("tracking.uri", scratch),
    ]
    assert "site.env.TMP=${TMPDIR}/x: no shell reads it, so ${TMPDIR}" in str(refused.value)
    assert "in site.setup, `export TMP=…`" in str(refused.value)


def test_user_lines_run_in_order_and_one_that_fails_is_named(tmp_path: Path) -> None:
    site = SiteConfig(
        env={"PLACE": "my place"},
        setup=[
            *("trap 'echo teardown $x' EXIT", "echo $UNSET in $PLACE", "false || true"),
            *("if true; then\n  x=1\nfi", "(exit 7)"),
        ],
    )
    done = run_in_bash(script(site), tmp_path, "echo ranks")
    assert done.stdout.splitlines() == ["in my place", "teardown 1"]
    assert done.stderr == (
        "error: site.setup: (exit 7) failed with exit code 7; the ranks were not started\n"
    )
    assert done.returncode == 7


def test_the_script_outlives_its_sigterm(tmp_path: Path) -> None:
    ranks = "kill -TERM $PPID; sleep 0.2; echo saved; exit 143"
    done = run_in_bash(script(), tmp_path, ranks, squeue="")
    assert (done.stdout, done.returncode) == ("saved\n", 143)


WAITING = "scancel --state=PENDING 9 8 9 10"


@pytest.mark.parametrize(
    ("code", "state", "verdict", "called", "in_chain"),
    [
        (137, "RUNNING", "requeue", AGAIN, AGAIN),
        (143, "RUNNING", "cancel", ["scancel 9_0"], [WAITING, "scancel 9_0"]),
        (1, "RUNNING", "", [], [WAITING]),
        (143, "COMPLETING", "requeue", [], []),  # preempted: the next job of the chain goes on
        (0, "RUNNING", "requeue", [], [WAITING]),
    ],
)
@pytest.mark.parametrize("chain", ["", "digits-1-2"])
def test_what_becomes_of_a_job_whose_ranks_have_ended(
    code: int,
    state: str,
    verdict: str,
    called: list[str],
    in_chain: list[str],
    chain: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "my python")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "9")
    asked = f"-m hpctrain.engine.job.verdict {tmp_path}/a run {code} 0"
    commands = {
        "my python": f'[[ "$*" == "{asked}" ]] && echo {verdict}',
        # The first job of the chain, which was preempted, has ended saving at the third look.
        "squeue": f"[[ $* == *COMPLETING* ]] || {{ echo {state}; exit; }}\n"
        "[[ $* == *=8 ]] && echo x >>looked && (($(wc -l <looked) < 3)) && echo COMPLETING",
        "sleep": "exit 0",
        "sacct": '[[ $* == *=8 ]] && printf "State\nPREEMPTED\n"',
        "scontrol": '[[ $1 == show ]] || echo scontrol "$@"',
        "scancel": 'echo scancel "$@"',
        "sed": f'if [[ $2 == 1p ]]; then echo "{tmp_path}/a run"; else /bin/sed "$@"; fi',
    }
    (tmp_path / "job_id").write_text("8\n9\n10\n")
    site = SiteConfig(setup=["trap 'echo teardown' EXIT"])
    text = sbatch_script(JobRequest.of(config(site)), tmp_path, 1, order=JobOrder(chain=chain))
    assert ("--dependency=singleton" in directives(text)) == bool(chain)
    assert (f"--job-name={chain or 'digits'}") in directives(text)
    done = run_in_bash(text, tmp_path, f"exit {code}", **commands)
    assert done.stdout.splitlines() == [*(in_chain if chain else called), "teardown"]
    assert done.returncode == code
    assert (tmp_path / "looked").exists() == bool(chain)


def test_the_job_behind_one_that_was_cancelled_ends_the_chain(tmp_path: Path) -> None:
    commands = {
        "squeue": "exit 1",  # it is not known any more
        "sacct": '[[ $* == *=8 ]] && printf "State\nCANCELLED by 5\n"',
        "scancel": 'echo scancel "$@"',
        "sed": f'if [[ $2 == 1p ]]; then echo "{tmp_path}/a run"; else /bin/sed "$@"; fi',
    }
    (tmp_path / "job_id").write_text("8\n9\n10\n")
    text = sbatch_script(JobRequest.of(config()), tmp_path, 1, order=JobOrder(chain="digits-1-2"))
    done = run_in_bash(f"SLURM_ARRAY_JOB_ID=9\n{text}", tmp_path, "echo ranks", **commands)
    assert (done.stdout, done.returncode) == (f"{WAITING}\n", 1)
    assert "was cancelled, and so the run" in done.stderr


# Slurm, as far as the loop of the ranks asks for it: a job of three nodes, of which one is a spare.
SLURM = {
    "squeue": """
case "$*" in
    *--format=%T) [[ ! -e away ]] || { rm away; exit 1; }; cat state 2>/dev/null || echo RUNNING ;;
    *--format=%N) echo nodes ;;
    *--format=%e) date --date=@2000000000 +%FT%T ;;
    *--steps=9.0,9.1) cat stuck 2>/dev/null ;;
esac""",
    "scontrol": """
case "$*" in
    "show hostnames nodes") cat nodes ;;
    "show job 9_0") echo "   ReqNodeList=(null) ExcNodeList=(null)" ;;
    "--oneliner show job 9_0")
        at=$(cat preempted 2>/dev/null || echo None)
        echo "JobId=9 StartTime=2026-11-26T15:52:05 EndTime=Unknown PreemptTime=$at Power=" ;;
    *) echo "scontrol $*" >>asked ;;
esac""",
    "scancel": 'echo "scancel $*" >>asked; [[ -e deaf && $* != *KILL* ]] || echo >ranks cancelled',
    "my python": """
step=$(cat steps); echo "verdict $5 $SLURM_JOB_END_TIME" >>asked
[[ ! -e cancelled ]] || echo COMPLETING >state
sed -n "$((step + 1))p" answers""",
    # The ranks end as the line of `plays` says, unless they hang until `scancel`.
    "srun": """
step=$(($(cat steps 2>/dev/null || echo -1) + 1)); echo "$step" >steps
export SLURM_PROCID=0 SLURM_STEP_ID=$step
play=$(sed -n "$((step + 1))p" plays)
for start; do [[ $start == trap* ]] && break; done
[[ $play == none* ]] || sh -c "$start" rank "$PWD/a run" 9_0 true
echo "srun $(grep -oE -- '--(overlap|nodelist=[^ ]*)' <<<"$*" | xargs)" >>asked
says() {
    printf '{"job_id": "9_0",\n "restart_count": 0,\n "step_id": %s,\n' "$1" >"a run/hang.json"
}
if [[ $play == old* ]]; then says $((step - 1)); sleep 2; play=${play#old}; fi
play=${play#none}
if [[ $play == hang ]]; then
    says "$step"
    until [[ -s ranks ]]; do sleep 0.1; done
    play=137
fi
[[ $play != term* ]] || { kill -TERM $PPID; play=${play#term}; }
exit "$play"
""",
}


ONCE = ["srun --nodelist=a,b", "verdict 0 2000000000"]
TWICE = [*ONCE, "srun --nodelist=a,b"]
KILLED = ["scancel 9.0", "scancel --signal=KILL 9.0"]
OTHERS = ["scancel 9.1", "verdict 1 2000000000", "srun --overlap --nodelist=a,c"]
FOUR = [word for n in range(4) for word in ("srun --nodelist=a,b", f"verdict {n} 2000000000")]


def excluded(nodes: str) -> list[str]:
    return [*ONCE, *AGAIN, f"scontrol update JobId=9_0 ExcNodeList={nodes}"]


@pytest.mark.parametrize(
    ("plays", "answers", "files", "asked"),
    [
        ("137 0", ["restart"], {}, TWICE),
        # A node is excluded, and its task cannot be killed.
        ("137 hang 0", ["restart", "restart --exclude=b"], {"stuck": "9.1"}, [*TWICE, *OTHERS]),
        # The ranks do not end at SIGTERM.
        ("hang 0", ["restart"], {"deaf": ""}, [TWICE[0], *KILLED, *TWICE[1:]]),
        # Too few nodes are left; the node of this shell is bad.
        ("137", ["restart --exclude=b,c"], {}, excluded("b,c")),
        ("137", ["restart --exclude=a"], {}, excluded("a")),
        # An observer of the first step is late; the controller is away for a moment.
        ("137 old0", ["restart"], {"away": ""}, TWICE),
        # The ranks do not begin.
        ("none137 none137 none137 1", ["restart"] * 3, {}, FOUR),
        # Its user cancels the job meanwhile.
        ("137", ["requeue"], {"cancelled": ""}, ONCE),
        # Its grace time has begun, of which only the ranks are told; or it was preempted before.
        ("137", ["restart"], {"preempted": "2026-11-26T15:59:00"}, [*ONCE, *AGAIN]),
        ("137 0", ["restart"], {"preempted": "2026-11-26T15:40:00"}, TWICE),
        # Slurm preempts the job meanwhile.
        ("term137", ["restart"], {}, [*ONCE, *AGAIN]),
    ],
)
def test_the_ranks_are_started_again_in_the_same_job(
    plays: str,
    answers: list[str],
    files: dict[str, str],
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "my python")
    for name, value in {"ARRAY_JOB_ID": 9, "JOB_ID": 9, "JOB_NUM_NODES": 3}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURMD_NODENAME", "a")
    given = {"plays": plays.replace(" ", "\n"), "answers": "\n".join(answers), "nodes": "a\nb\nc"}
    for name, text in (given | files).items():
        (tmp_path / name).write_text(text + "\n")
    text = sbatch_script(JobRequest.of(config(nodes=2, spares=1)), tmp_path, 1)
    (tmp_path / "tasks").write_text(f"{tmp_path}/a run\n")
    assert {"--nodes=3", "--no-kill"} < directives(text)
    done = run_in_bash(text, tmp_path, sed='exec /usr/bin/sed "$@"', **SLURM)
    assert (tmp_path / "asked").read_text().splitlines() == asked, done.stderr
    assert done.returncode == int(plays.split()[-1].lstrip("termold"))
    begun = [n for n, play in enumerate(plays.split()) if not play.startswith("none")]
    assert (tmp_path / "a run" / "epochs").read_text() == "".join(f"9_0 0 {n}\n" for n in begun)


def test_modules_where_there_are_none(tmp_path: Path) -> None:
    done = run_in_bash(script(SiteConfig(modules=["cuda/12.4"])), tmp_path, "echo ranks")
    assert "module: command not found" in done.stderr
    assert "error: site.modules: module load cuda/12.4 failed with exit code 127" in done.stderr
    assert done.stdout == ""
    assert "source /etc/profile" in script(SiteConfig(setup=["module purge"]))


def test_commands_of_module_keep_their_place(tmp_path: Path) -> None:
    modules = ["purge", "use /sw/my mods", "gcc/12", "cuda/12.4", "--force unload gcc", "nccl"]
    text = script(SiteConfig(modules=modules))
    done = run_in_bash(f'module() {{ echo "$*"; }}\n{text}', tmp_path)
    assert done.stdout.splitlines() == [
        "purge",
        "use /sw/my mods",
        "load gcc/12 cuda/12.4",
        "--force unload gcc",
        "load nccl",
    ]


def test_a_snapshot_comes_before_everything_else(tmp_path: Path) -> None:
    snapshot = tmp_path / "my code"
    text = sbatch_script(JobRequest.of(config()), FOLDER, 1, pythonpath=[snapshot, Path("/lib")])
    text = f"export PYTHONPATH=/before\n{text}"
    done = run_in_bash(text, tmp_path, "echo $PYTHONPATH $PYTHONSAFEPATH")
    assert done.stdout == f"{snapshot}:/lib:/before 1\n"
    assert "PYTHONPATH" not in script()
    with pytest.raises(ConfigError, match="PYTHONPATH cannot name a path with a colon"):
        sbatch_script(JobRequest.of(config()), FOLDER, 1, pythonpath=[Path("/a:b")])


def test_apptainer_stands_between_srun_and_python() -> None:
    container = ContainerConfig("apptainer", "/my image.sif", "python3.12", ["/scratch:/tmp"])
    text = script(SiteConfig(container=container), gpus_per_node=1)
    command = " ".join(srun_words(text))
    # The sweep's folder is in output_dir, so it needs no bind of its own.
    binds = "--bind=/runs --bind=/data/digits --bind=/scratch:/tmp"
    assert f"apptainer exec \"$container_gpus\" {binds} '/my image.sif' /bin/sh -c" in command
    assert "scontrol requeue" in text
    assert "container_gpus" not in script(SiteConfig(container=container))
    asked = replace(config(SiteConfig(container=container)), output_dir="/a,b")
    with pytest.raises(ConfigError, match="apptainer takes the ',' for the end of a path"):
        sbatch_script(JobRequest.of(asked), FOLDER, 1)


@pytest.mark.parametrize(
    ("files", "option"),
    [((), "--nv"), (("nvidia",), "--nv"), (("kfd",), "--rocm"), (("kfd", "nvidia"), "--nv")],
)
def test_the_node_says_by_which_option_a_container_sees_its_gpus(
    files: tuple[str, ...], option: str, tmp_path: Path
) -> None:
    """The files of drivers are planted."""
    for name in files:
        (tmp_path / name).touch()
    text = CHOOSE_GPUS.replace("/dev/kfd", f"{tmp_path}/kfd")
    text = text.replace("/proc/driver/nvidia/version", f"{tmp_path}/nvidia")
    words = in_container(ContainerConfig("apptainer", "/i.sif"), [], has_gpus=True)[1]
    text = f"set -eu\n{text}\nprintf '%s ' {shell_words(words)}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == f"apptainer exec {option} /i.sif "


def test_pyxis_is_asked_by_options_of_srun() -> None:
    container = ContainerConfig("pyxis", "nvcr.io#nvidia/pytorch:25.05", binds=["/a", "/b:/c:ro"])
    command = " ".join(srun_words(script(SiteConfig(container=container))))
    assert "'--container-image=nvcr.io#nvidia/pytorch:25.05'" in command
    assert "--container-mounts=/runs:/runs,/data/digits:/data/digits,/a:/a,/b:/c:ro" in command
    assert "apptainer" not in command
    container = ContainerConfig("pyxis", args=["--environment=/my.toml"])
    command = " ".join(srun_words(script(SiteConfig(container=container))))
    assert "--export=ALL --cpus-per-task=1 --environment=/my.toml /bin/sh -c" in command


def test_a_command_of_ones_own_starts_the_container() -> None:
    container = ContainerConfig("command", args=["shifter", "--image=me/hpctrain:1"])
    text = script(SiteConfig(container=container))
    assert "--cpus-per-task=1 shifter --image=me/hpctrain:1 /bin/sh -c" in " ".join(
        srun_words(text)
    )
    assert "\n    shifter --image=me/hpctrain:1 python -m hpctrain.engine.job.verdict" in text
    assert "HPCTRAIN_REQUEUE_NOTE" in text


@pytest.mark.parametrize("hosts", ["", "node[1-2],node4"])
def test_the_host_requeues_for_a_container(hosts: str, tmp_path: Path) -> None:
    """Its batch script reads the note of rank 0, with the hosts that the job shall avoid."""
    asked, run = tmp_path / "asked", tmp_path / "a run"
    text = "export SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=1\nranks() { exec srun; }\njob=7_1\n"
    text += f"nodes=1 run='{run}'\n{steps.TEXT}\nrun_steps\nexit $code"
    known = "ExcNodeList=node9 " if hosts else "ExcNodeList=(null) "
    programs = {
        "squeue": "echo RUNNING",
        "scontrol": f'[[ $1 == show ]] && echo "{known}" || echo "$*" >>{asked}',
    }
    # It is as `leave_note` writes it, and rank 0 waits until it is gone.
    waits = f"while [[ -e '{run}/requeue' ]]; do sleep 0.1; done"
    done = run_in_bash(text, tmp_path, f"echo '{hosts}' >'{run}/requeue'; {waits}", **programs)
    assert done.returncode == 0
    update = [f"update JobId=7_1 ExcNodeList=node9,{hosts}"] if hosts else []
    assert asked.read_text().splitlines() == [
        *("update JobId=7_1 Requeue=1", "requeue 7_1"),
        *update,
    ]


@pytest.mark.parametrize(("last", "code"), [("8 0 0", 6), ("7_1 0 0", 9)])
def test_a_job_of_which_another_one_trains_the_run_leaves_it(
    last: str, code: int, tmp_path: Path
) -> None:
    """Neither does it begin, nor does it cancel the jobs of its chain."""
    run = tmp_path / "a run"
    text = "ranks() { exec srun; }\nverdict() { echo leave; }\nend_chain() { echo ended; }\n"
    text += f"echo '{last}' >'{run}/epochs'; job=7_1 nodes=1 run='{run}'\n{steps.TEXT}\nrun_steps\n"
    done = run_in_bash(f"{text}exit $code", tmp_path, "exit 9", squeue="echo RUNNING")
    assert (done.returncode, done.stdout) == (code, "")
    assert (f"job 8 trains {run}: this one ends" in done.stderr) == (code == 6)


# What the page of a real site, which its file names, asks for in its example of two nodes (Mahti: a
# GPU). The lines that no site decides are left out.
PUBLISHED = {
    "daint": "--account=g1234 --partition=normal --gpus-per-node=4",
    "delta": "--account=abcd-delta-gpu --partition=gpuA100x4 --constraint=scratch --mem=212992M "
    "--gpus-per-node=4",
    "frontier": "--account=abc123 --partition=batch",
    "jean_zay": "--account=abc@a100 --constraint=a100 --gres=gpu:8 --hint=nomultithread",
    "juwels_booster": "--account=my-project --partition=booster --gres=gpu:4",
    "leonardo": "--account=my-project --partition=boost_usr_prod --gres=gpu:4",
    "lumi": "--account=project_465000000 --partition=standard-g --gpus-per-node=8",
    "mahti": "--account=project_2001234 --partition=gpusmall --gres=gpu:a100:1,nvme:950",
    "marenostrum5": "--account=ehpc123 --qos=acc_ehpc --gres=gpu:4",
    "perlmutter": "--account=m1234_g --constraint=gpu --qos=regular --gpus-per-node=4",
}
OURS = "job-name time signal requeue distribution array output open-mode"


@pytest.mark.parametrize("file", sorted((ROOT / "conf/site").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_site_gives_a_script(file: Path) -> None:
    shape = ["launch.mem_gb=8", "launch.tasks_per_node=2", "launch.gpus_per_node=2"]
    published = PUBLISHED.get(file.stem)
    if published:
        shape = re.findall(r"launch\.\w+=\d+", file.read_text())
        shape += ["launch.nodes=2"] * (file.stem != "mahti")
    composed = compose_config(["experiment=digits", f"site={file.stem}", *shape])
    assert composed is not None
    validate(composed)
    text = sbatch_script(JobRequest.of(composed), FOLDER, 2)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, check=False)
    assert checked.returncode == 0
    if published:
        launch = composed.launch
        size = launch.nodes, launch.tasks_per_node, launch.cpus_per_task
        asked = "--nodes={} --ntasks-per-node={} --cpus-per-task={} ".format(*size) + published
        lines = {line for line in directives(text) if line[2:].split("=")[0] not in OURS.split()}
        assert lines == {*asked.split()}


def test_the_example_names_every_key() -> None:
    text = (ROOT / "conf/site/example.yaml").read_text()
    keys = set(re.findall(r"^ *(\w+):", text, re.MULTILINE))
    assert SiteConfig.__dataclass_fields__.keys() <= keys
    assert ContainerConfig.__dataclass_fields__.keys() <= keys


def test_what_an_allocation_leaves_behind_is_not_inherited() -> None:
    hostile = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_NTASKS": "9",
        "SBATCH_PARTITION": "x",
        "SRUN_CPUS_PER_TASK": "1",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "OMPI_MCA_orte_jobid": "1",
        "MPI_LOCALRANKID": "0",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "ROCR_VISIBLE_DEVICES": "0",
        "HPCTRAIN_LAUNCHER": "single",
    }
    kept = {
        "SLURM_CONF": "/etc/slurm.conf",
        "HOME": "/home/me",
        "MPI_HOME": "/opt/mpi",
        "MLFLOW_TRACKING_TOKEN": "t",
        "NAME": "n",
    }
    assert clean_environment(hostile | kept) == kept
