"""Checks of Slurm from a login node: does it answer, and would it run the jobs of this config?"""

from collections.abc import Iterator
from pathlib import Path

from hpctrain.config.schema import Config
from hpctrain.doctor.finding import Finding, bounded, good, unknown
from hpctrain.errors import HpctrainError, LaunchError
from hpctrain.slurm import sbatch
from hpctrain.slurm.partition_limit import minutes, road
from hpctrain.slurm.queue import UnreachableError, ask, rows, version
from hpctrain.slurm.script import sbatch_script

_USABLE = ("idle", "mixed", "allocated", "completing", "reserved", "planned", "mix", "alloc")


def checked(config: Config) -> Iterator[Finding]:
    """Check Slurm with the sections `launch` and `site`."""
    if not sbatch.available():
        yield unknown(
            "Slurm",
            "no sbatch on the PATH",
            "This host cannot submit jobs: runs train on this machine; on a cluster, log in to a "
            "login node or load its module.",
        )
        return
    answer = ask("scontrol", "ping", quiet=True)
    if answer is None or " is UP" not in answer:
        found = " ".join((answer or "no answer").split())
        cure = "Wait, or tell the administrators: submissions fail until slurmctld answers."
        yield Finding("Slurm's controller", "fail", found, "is UP", cure)
        return
    up = [line.strip() for line in answer.splitlines() if " is UP" in line]
    words = version(ask("sinfo", "--version", quiet=True) or "") or "version unknown"
    yield good("Slurm's controller", ", ".join([words, *up]))
    yield from _partition(config)
    yield _job(config)


def partition_findings(listed: str, config: Config) -> Iterator[Finding]:
    """Judge the partitions, by lines `NAME|up|LIMIT|NODES|STATE`; `NAME*` is the default one."""
    found = rows(listed, (r"[^|]+", "[a-z]+", r"[\d:-]+|infinite|unlimited", r"\d+", r"[^|]+"))
    wanted = config.site.partition
    names = wanted.split(",") if wanted else [row[0][:-1] for row in found if row[0].endswith("*")]
    for name in dict.fromkeys(names):
        check = f"partition {name}"
        own = [row for row in found if row[0].rstrip("*") == name]
        if not own:
            known = ", ".join(sorted({row[0].rstrip("*") for row in found})) or "unknown"
            cure = f"Set site.partition to one of: {known}."
            yield Finding(check, "fail", "does not exist", "a partition of this cluster", cure)
            continue
        states = ", ".join(f"{row[3]} {row[4]}" for row in own)
        if any(row[1] != "up" for row in own):
            cure = "Choose another partition (site.partition), or wait until it is open again."
            yield Finding(check, "fail", own[0][1], "up", cure)
            continue
        usable = sum(int(row[3]) for row in own if row[4].rstrip("*~#!%$@+-") in _USABLE)
        yield bounded(
            check,
            usable,
            f"nodes: {states}",
            warn_below=config.launch.node_numbers.start + config.launch.spares,
            expected=f"launch.nodes={config.launch.nodes} that work",
            cure="The job waits until nodes come back: ask for fewer (launch.nodes).",
        )
        limit = min(minutes(row[2]) for row in own)
        asked = config.launch.time_min
        if not isinstance(asked, int):  # auto, which only a training can have
            continue
        yield bounded(
            f"time limit of {name}",
            limit,
            f"{own[0][2]} (launch.time_min={asked})",
            fail_below=asked,
            expected=f"at least {asked} minutes",
            cure=f"Set launch.time_min to at most {limit:g}, or choose another partition.",
        )


def _partition(config: Config) -> Iterator[Finding]:
    listed = ask("sinfo", "--noheader", "--format=%P|%a|%l|%D|%T", quiet=True)
    if listed is None:
        yield unknown("partitions", "sinfo does not answer")
        return
    yield from partition_findings(listed, config)
    check, found = "after a preemption", road(config.site, config.launch.chain)
    if not found.name:
        yield unknown(check, "scontrol does not answer")
    elif found.name == "by hand":
        cure = "Set launch.chain to null or more, or choose another partition (site.partition)."
        yield Finding(check, "warn", f"by hand: {found.why}", "a requeue or a chain", cure)
    else:
        yield good(check, ": ".join(filter(None, (found.name, found.why))))


def _job(config: Config) -> Finding:
    """Ask Slurm whether it would run a job of this config."""
    check = "a job of this config"
    try:
        script = sbatch_script(config, Path(config.output_dir) / "doctor", 1, command="call")
        return good(check, sbatch.expected_start(script, config))
    except UnreachableError as error:
        return unknown(check, str(error))
    except LaunchError as error:
        return Finding(check, "fail", str(error), "accepted", "Correct the keys that are named.")
    except HpctrainError as error:
        return Finding(check, "fail", str(error), "a batch script", "Correct the named key.")
