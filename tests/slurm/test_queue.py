"""Tests of the scheduler's commands, with stand-ins for the commands."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.files.record import convert
from hpctrain.base.forks import JOB_SIGNALS, run
from hpctrain.base.names.run_record import RunRecord
from hpctrain.cluster.slurm import partition_limit, release, requeue
from hpctrain.cluster.slurm.queue import (
    Ended,
    Job,
    Queue,
    UnreachableError,
    ask,
    cancel,
    ended,
    jobs_of,
    queued,
)
from hpctrain.cluster.slurm.sbatch import (
    FullQueueError,
    SubmitLimitError,
    expected_start,
    nodes_that_fit,
    partitions,
)
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, LaunchConfig, SiteConfig
from hpctrain.errors import LaunchError
from hpctrain.insight.doctor.login import slurm
from hpctrain.insight.report.account.time_parts import allocations
from hpctrain.launch.executors import SlurmExecutor
from hpctrain.runs.state.shared_job import job_of


def test_a_command_does_not_die_of_the_signals_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "squeue"
    kills = "\n".join(f"kill -s {number.value} $$" for number in JOB_SIGNALS)
    program.write_text(f"#!/bin/sh\n{kills}\necho RUNNING\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert ask("squeue", "--jobs", "1") == "RUNNING\n"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*JOB_SIGNALS}  # only the program


def test_a_command_that_is_late_is_killed(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(["sh", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 60"], timeout=0.2)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


@pytest.mark.parametrize(
    "answer", ["12", "12;main", "Welcome to node 3 of 40\n2026\n12\nBalance: 7 SU\n\n"]
)
def test_the_job_id_in_an_answer_of_sbatch(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert SlurmExecutor(tmp_path, JobRequest.of(Config())).queue() == ["12"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Resource temporarily unavailable", FullQueueError),  # MaxJobCount
        ("Slurm job queue full, sleeping and retrying", FullQueueError),
        ("Unable to create job record, try again", FullQueueError),
        ("Job violates accounting/QOS policy (job submit limit, user's size", SubmitLimitError),
        ("Zero Bytes were transmitted or received", UnreachableError),
        ("Slurm backup controller in standby mode", UnreachableError),
        ("Communications connection failure", UnreachableError),
        ("Invalid partition name specified", LaunchError),
    ],
)
def test_refusals_that_pass_are_told_from_others(
    words: str, kind: type[LaunchError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "squeue"):
        answer = f'echo "sbatch: error: Batch job submission failed: {words}" >&2; exit 1'
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("hpctrain.cluster.slurm.sbatch._PAUSES_S", (0, 0))
    with pytest.raises(LaunchError) as caught:
        SlurmExecutor(tmp_path, JobRequest.of(Config())).queue()
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("kind", "count", "fitting"),
    [(None, 6, 1), (None, 2, 2), ("a100", 4, 1), ("a100", 5, 0), ("V100", 2, 1), ("h100", 1, 0)],
)
def test_nodes_with_gpus_of_a_type_are_counted(
    kind: str | None, count: int, fitting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho 'batch*|up|infinite|NO|16000|1|8|1|gpu:a100:4(S:0-1),gpu:v100:2||n1'\n"
        "echo 'batch*|up|infinite|NO|16000|1|8|1|gpu:2||n2'\n"
        "echo 'other|up|infinite|NO|16000|1|8|1|gpu:h100:8||n3'\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = Config()
    config.launch.gpus_per_node, config.site.gpu_type = count, kind
    for mem_gb, found in ((15.625, fitting), (15.7, 0)):  # 16,000 of Slurm's MB are 15.625 GiB
        config.launch.mem_gb = mem_gb
        assert nodes_that_fit(config.launch, config.site) == {"batch": found}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"state": "interrupted", "submission": {"script": "/a/job.sh", "task": 3}}, "7_3"),
        ({"state": "queued", "submission": {"script": "/a/job.sh", "task": 4}}, None),
        ({"state": "interrupted", "attempts": [{"job_id": "9"}]}, "9"),
        ({"state": "failed", "attempts": [{"job_id": "9"}]}, None),
        ({"state": "interrupted", "attempts": []}, None),
    ],
)
def test_the_job_of_a_run_is_found_by_its_script_or_by_its_id(
    record: dict[str, Any], expected: str | None
) -> None:
    jobs = {
        ("/a/job.sh", 3): Job("7_3", "PENDING", "BeginTime", "", "N/A"),
        ("job 9", 0): Job("9", "PENDING", "BeginTime", "", "N/A"),
    }
    found = job_of(Path("run"), convert(RunRecord, record, "run.json"), Queue(jobs))
    assert (found and found.id) == expected


# A wrapper of a site: a welcome in Latin-1 before, a warning between, a balance after.
SITE = """#!/bin/sh
echo '*** Welcome to TACC | node 3 | 2026 ***'
printf 'Gr\\374\\337e\\n'
case "$(basename "$0") $*" in
%s
*) echo unexpected "$0" "$@" >&2; exit 3 ;;
esac
echo 'bash: warning: setlocale: LC_ALL: cannot change locale' >&2
echo 'Balance: 7 SU'
"""


def forget() -> None:
    for cached in ("cluster_config", "partition_lines"):
        getattr(partition_limit, cached).cache_clear()
    release.words.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Stand-ins for Slurm's commands that answer what is given, as they would on such a site."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def answering(**answers: str) -> None:
        cases = []
        for name, text in answers.items():
            command, _, words = name.partition("_")
            lines = text.replace("\n", "\nwarning: a slow file system\n")
            pattern = f"{command}*{words.replace('_', '*')}*"
            cases.append(f"{pattern}) cat <<'END'\n{lines}\nEND\n;;")
        for name in answers:
            program = folder / name.partition("_")[0]
            program.write_text(SITE % "\n".join(cases))
            program.chmod(0o755)
        forget()

    yield answering
    forget()


def test_what_a_site_prints_around_an_answer_is_left_out(site: Callable[..., None]) -> None:
    site(
        squeue_user="3|7_3|RUNNING|None|n1|2026-01-01T00:00:00|n1|/a/b|c\n"
        "N/A|9|PENDING|Priority||N/A|n/a|x\nN/A|8|RUNNING|None|n[2-3]|N/A|n1|y"
        "\n0|12_0|PENDING|Dependency||N/A|n/a|/d\n0|11_0|RUNNING|None|n2|N/A|n2|/d"
        "\n0|10_0|COMPLETING|None|n1|N/A|n1|/d",
        squeue_jobs="RUNNING",
        sacct_Reason="7_3|CANCELLED by 5|0:15|a|b|n1\n7_4|FAILED|1:0|None|n[1-2]",
        sacct_Submit="7_3|2026-01-01T00:00:00|2026-01-01T00:00:09|Unknown|RUNNING\nx|y",
        sinfo_noheader="batch*|up|1:00:00|NO|16000+|1|8+|1+|gpu:2|(null)|n1",
        srun_version="slurm-wlm 22.05.8",
        scancel="",
    )
    jobs = queued(["me"])
    assert jobs["/a/b|c", 3] == Job("7_3", "RUNNING", "None", "n1", "2026-01-01T00:00:00", "n1")
    assert jobs["job 9", 0].reason == "Priority"
    # The node of a batch script is no longer one of the job.
    lost = (
        "its batch script was lost with n1, so it runs nothing and never ends: scontrol requeue 8"
    )
    assert jobs["job 8", 0].needs == lost
    assert [job.needs for job in jobs.values()].count("") == 5
    # The jobs of a chain, of which the first still ends.
    front = jobs["/d", 0]
    assert (front.id, front.state, front.behind) == ("11_0", "RUNNING", ("10_0", "12_0"))
    assert [jobs[f"job {each}", 0].state for each in front.behind] == ["COMPLETING", "PENDING"]
    assert len(jobs) == 6
    tasks = {
        "7_3": Ended("CANCELLED by 5", "0:15", "a|b", "n1"),
        "7_4": Ended("FAILED", "1:0", "None", "n[1-2]"),
    }
    assert ended(["7"]) == tasks
    ((found,),) = (allocations(["7_3"]) or {}).values()
    assert found.start == found.submitted + 9
    assert (found.end, found.state) == (None, "RUNNING")
    assert nodes_that_fit(Config().launch, Config().site) == {"batch": 1}
    assert partitions() == ["batch"]
    assert requeue._state("7_3") == "RUNNING"
    cancel(["7_3"])  # a warning about the locale is no refusal


def test_an_answer_in_another_form_is_no_empty_queue(site: Callable[..., None]) -> None:
    site(squeue="")
    assert queued(["me"]) == {}
    heading = "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)"
    for other in (heading, "   12_1 batch digits me R 1:02 1 n1", "batch|digits|me|R|1:02|n1"):
        site(squeue=other)
        with pytest.raises(UnreachableError, match=r"squeue prints '.* and was asked for --format"):
            queued(["me"])


CONFIG = "PreemptMode = REQUEUE\nPreemptType = preempt/partition_prio\nJobRequeue = {}"
PARTITION = "PartitionName={} Default={} PriorityTier={} GraceTime={} PreemptMode={} State=UP"


@pytest.mark.parametrize(
    ("partition", "requeues", "grace_s", "mode", "chain", "road", "jobs"),
    [
        ("low", 1, 30, "CANCEL", None, "requeue: a job that the partition low preempts req", 1),
        ("low", 1, 0, "CANCEL", None, "chain: the partition low cancels jobs that are pree", 3),
        ("low", 1, 0, "CANCEL", 5, "chain: the partition low cancels jobs that are preempted", 5),
        ("low", 1, 0, "CANCEL", 1, "by hand: the partition low cancels jobs that are preempted", 1),
        ("low", 1, 0, "REQUEUE", None, "requeue: Slurm starts a preempted job again (partition", 1),
        ("low", 1, 0, "REQUEUE", 2, "chain: launch.chain=2 asks for it", 2),
        ("low,high", 1, 0, "CANCEL", None, "chain: the partition low cancels", 3),
        ("high", 1, 0, "CANCEL", None, "requeue: Slurm preempts no job of the partition high", 1),
        (None, 1, 0, "CANCEL", None, "requeue: Slurm preempts no job of the partition high", 1),
        ("low", 0, 0, "REQUEUE", None, "requeue: Slurm starts a preempted job again (", 1),
    ],
)
def test_the_road_of_a_site(
    partition: str | None,
    requeues: int,
    grace_s: int,
    mode: str,
    chain: int | None,
    road: str,
    jobs: int,
    site: Callable[..., None],
) -> None:
    lines = (
        PARTITION.format("low", "NO", 1, grace_s, mode),
        PARTITION.format("high", "YES", 5, 0, "CANCEL"),
    )
    site(
        scontrol_config=CONFIG.format(requeues),
        scontrol_partition="\n".join(lines),
        scontrol_ping="Slurmctld(primary) at head is UP",
        scontrol_version="slurm 22.05.8",
        sinfo_noheader="high*|up|1:00:00|2|idle\nlow|up|infinite|2|idle",
        sacctmgr="main|normal",
        sbatch="12",
    )
    config = Config(site=SiteConfig(partition=partition), launch=LaunchConfig(chain=chain))
    findings = {each.check: each for each in slurm(JobRequest.of(config))}
    found = findings["after a preemption"]
    assert found.found.startswith(road)
    assert found.result == ("warn" if road.startswith("by hand") else "pass")
    assert ("JobRequeue=0 is healed" in found.found) == (requeues == 0)
    assert partition_limit.road(config.site, chain).jobs == jobs
    up = "slurm 22.05.8, Slurmctld(primary) at head is UP"
    assert findings["Slurm's controller"].found == up


@pytest.mark.parametrize(
    ("said", "road", "grace_s"),
    [
        ("cancel|00:02:00", "requeue", 120),
        ("cancel|00:00:00", "chain", None),
        ("cluster|00:00:00", "requeue", None),
        ("", "requeue", None),
    ],
)
def test_a_qos_that_is_preempted_says_how(
    said: str, road: str, grace_s: int | None, site: Callable[..., None]
) -> None:
    site(
        scontrol_config="PreemptMode = REQUEUE\nPreemptType = preempt/qos\nJobRequeue = 1",
        scontrol_partition=PARTITION.format("low", "YES", 1, 0, "CANCEL"),
        sacctmgr=said,
    )
    found = partition_limit.road(SiteConfig(qos="scavenger"), None)
    assert (found.name, found.grace_s) == (road, grace_s)
    assert "QOS scavenger" in found.why


def test_the_words_of_sbatch_are_told_from_a_banner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sbatch"
    program.write_text(
        "#!/bin/sh\necho 'An invalid use of this system is illegal' >&2\n"
        "echo 'sbatch: Job 7 to start at 2026-01-01T00:00:00 on nodes n1' >&2\nexit $CODE\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CODE", "0")
    assert (
        expected_start("", JobRequest.of(Config())) == "to start at 2026-01-01T00:00:00 on nodes n1"
    )
    monkeypatch.setenv("CODE", "1")
    assert expected_start("", JobRequest.of(Config())).startswith(
        "not now, it will wait (sbatch: Job 7"
    )
    with pytest.raises(LaunchError, match=r"^sbatch refused the job: sbatch: Job 7"):
        SlurmExecutor(tmp_path, JobRequest.of(Config())).queue()


def test_array_tasks_in_one_word() -> None:
    ids = ["7_3", "9_0", "7_1", "7_2", "7_9", "12"]
    assert jobs_of(ids) == ["12", "7_[1-3,9]", "9_[0]"]
