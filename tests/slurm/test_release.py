"""What newer versions of Slurm can do, and what older ones refuse: before anything is queued."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster.slurm import release, steps
from hpctrain.cluster.slurm.script import sbatch_script
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, DataConfig, SiteConfig
from hpctrain.errors import ConfigError

ALLOWED = "SlurmctldParameters     = idle_on_node_suspend,enable_expedited_requeue\n"


@pytest.fixture(autouse=True)
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "words", lambda: "slurm-wlm 26.05.5")
    monkeypatch.setattr(release, "cluster_config", lambda: ALLOWED)


def script(command: str = "run", srun: tuple[str, ...] = (), **options: Any) -> str:
    site = SiteConfig(sbatch=options, srun=[*srun])
    config = Config(output_dir="/runs", data=DataConfig(path="/data"), site=site)
    return sbatch_script(JobRequest.of(config), Path("/runs/array-0"), 1, command=command)


def test_an_expedited_job_that_fails_for_good_is_not_held(tmp_path: Path) -> None:
    text = script(requeue="expedite")
    assert "#SBATCH --requeue=expedite\n" in text
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >>{tmp_path}/asked\n")
    scontrol.chmod(0o755)
    (defined,) = [line for line in text.splitlines() if line.startswith("end_expedited()")]
    for code in (0, 3):
        shell = f"SLURM_JOB_ID=5\n{defined}\n{steps.TEXT}\ncode={code}\nends_for_good"
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", shell], env=env, check=True)
    assert (tmp_path / "asked").read_text() == "update JobId=5 Requeue=0\n"
    assert "#SBATCH --requeue\n" in script("call", requeue="expedite")
    assert "end_expedited()" not in script()


@pytest.mark.parametrize(
    ("words", "config", "options", "message"),
    [
        ("slurm 26.05.5", ALLOWED, {"requeue": "quick"}, "requeue=quick: expedite, or nothing"),
        (
            "slurm 26.05.5",
            "SlurmctldParameters = (null)",
            {"requeue": "expedite"},
            "does not allow",
        ),
        (
            "slurm-wlm 22.05.8",
            ALLOWED,
            {"requeue": "expedite"},
            r"requeue=expedite: it needs Slurm 25\.11 or newer, and this is slurm-wlm 22\.05\.8",
        ),
        ("slurm 25.11.4", ALLOWED, {"mem-update": "20@30"}, r"20@30: it needs .* 26\.05"),
        ("slurm 26.05.5", ALLOWED, {"srun": ("--async",)}, "site.srun: --async: srun would return"),
    ],
)
def test_what_this_slurm_cannot_do_is_refused(
    words: str, config: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "words", lambda: words)
    monkeypatch.setattr(release, "cluster_config", lambda: config)
    with pytest.raises(ConfigError, match=message):
        script(**options)


@pytest.mark.parametrize("words", ["", "slurm 26.05.0", "slurm 27.02.1"])
def test_what_it_can_do_is_taken(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm shows a script, too (launch.dry_run=true)."""
    monkeypatch.setattr(release, "words", lambda: words)
    monkeypatch.setattr(release, "cluster_config", lambda: ALLOWED if words else None)
    assert "#SBATCH --mem-update=20@30\n" in script(**{"mem-update": "20@30"})
    assert "#SBATCH --requeue=expedite\n" in script(requeue="expedite")
