"""The part of the batch scripts that starts the ranks, and starts them again in the same job.

    run_steps ── choose nodes ── srun of the ranks ──┬── end of srun ──────────────┐
       ▲                                             └── hang.json ── scancel STEP ┤
       │                                                                           ▼
       ├──────────── restart [--exclude=HOSTS] ──────────────────────── hpctrain.engine.job.verdict
       └── no good nodes, or Slurm ends the job ── requeue ◀───────────────────────┘

It is one shell text, `steps.sh`: the scripts of sweeps contain it, and the templates in `slurm/`
evaluate what `python -m hpctrain.cluster.slurm.steps` prints.
"""

from pathlib import Path

TEXT, PACK = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("steps.sh", "pack.sh")
)
"""The shell functions of the batch scripts, of which `run_steps` starts the ranks, and `run_pack`
those of several runs."""


if __name__ == "__main__":
    print(TEXT, end="")
