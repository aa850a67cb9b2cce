"""Where all doors end: train a frozen run directory on the ranks that are here.

python -m hpctrain …            ┐
torchrun -m hpctrain …          ├── freeze ──┐
python -m hpctrain -m …         │            ├── train(config, run, ranks)
sbatch slurm/train.sbatch …     ┘            ┘
"""

from __future__ import annotations

import faulthandler
import logging

from hpctrain.config.schema import Config
from hpctrain.distributed.group import process_group
from hpctrain.distributed.ranks import RankInfo
from hpctrain.faults.stop import Stop, stop_with_launcher
from hpctrain.job.attempt import Attempt, NoAttempt
from hpctrain.job.build import build
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.stop_request import stop_file

log = logging.getLogger(__name__)
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def train(config: Config, run: RunDir, ranks: RankInfo) -> int:
    """Train the run from its last checkpoint.

    Args:
        config: the frozen config.
        run: its directory; rank 0 holds it for the time of the training.
        ranks: this process's place.

    Returns:
        The exit code: 0, or 130 / 143 when it was asked to stop and has saved.

    Raises:
        HpctrainError: what the user can mend; recorded in the run directory as well.
    """
    faulthandler.enable()  # a mapped shard that was cut off ends the process: it says where
    if ranks.launcher in ("torchrun", "submitit-local"):
        stop_with_launcher()
    # From here on a signal is a request to stop, not a sudden death.
    with (
        Stop() as stop,
        Attempt(config, run, ranks) if ranks.is_main else NoAttempt() as attempt,
        process_group(ranks, config.parallel, config.launch.cpus_per_task) as device,
    ):
        if ranks.is_main:
            log.info("%s on %s, %s", run.path, device, ranks)
            stop.watch(stop_file(run.path))
        outcome = build(config, run, ranks, device, attempt.tracker, stop).fit()
        # Inside the group, whose teardown waits for rank 0: Slurm and torchrun end all ranks as
        # soon as one has left with a code other than 0.
        if outcome.finished:
            attempt.finished(outcome)
            return 0
        attempt.interrupted(outcome, stop.reason)
        return EXIT_INTERRUPTED if stop.reason == "SIGINT" else EXIT_TERMINATED
