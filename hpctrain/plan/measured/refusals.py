"""What `plan --measure` needs, checked before any work and without torch."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.slurm import sbatch


def check(overrides: Sequence[str], shape: str | None) -> None:
    """Refuse what no layout can be measured for; a LaunchError if this machine has no `sbatch`."""
    without = [text for text in overrides if text in ("data=null", "data.path=null")]
    if shape is not None:
        without.append(f"--sample-shape={shape}")
    if without:
        raise ConfigError(
            f"--measure with {without[0]}: measuring trains some steps, so it needs a data set: "
            "give data=NAME or data.path=FOLDER"
        )
    if "launch.dry_run=true" in overrides:
        raise ConfigError("--measure with launch.dry_run=true: it submits jobs; leave one out")
    if not sbatch.available():
        raise LaunchError(
            "--measure submits jobs, but sbatch is not on the PATH: call it on a login node of a "
            "Slurm cluster. Without one, train some steps (train.max_steps=40 train.log_every=5), "
            "and give the run to plan --from-run"
        )
