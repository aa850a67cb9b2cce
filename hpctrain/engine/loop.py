"""Our own loop: one model, one task, one optimizer. A config names it if it names no other loop.

loop: {_target_: hpctrain.supervised} ── build ── the steps of the session, each a TrainStep
"""

import logging

from hpctrain.base.extensions import offered
from hpctrain.base.processes.causes import is_out_of_memory
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm.requeue import requeue_from_rank
from hpctrain.engine.building.build import build
from hpctrain.engine.session import Session
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)


def supervised(session: Session) -> None:
    """Train `model` on `task` with `optimizer` and `scheduler`, as the config has them.

    Out of memory prepares the next attempt, and is raised.
    """
    place = session.place
    trainer = build(place)
    session.use(trainer.session)
    place.begun()
    try:
        trainer.fit()
    except RuntimeError as error:
        if is_out_of_memory(error):
            sizes, ranks = trainer.micro_batches, place.ranks
            if sizes is None or (rows := sizes.smaller) is None:
                cures = offered("cures")("one row", place.config, ranks.world_size)
                log.error("out of memory: %s", cures)
            else:
                _lower_micro_batch(place.run, ranks, sizes.rows, rows)
        raise


def _lower_micro_batch(run: RunDir, ranks: RankInfo, rows: int, smaller: int) -> None:
    """Let the next attempt use smaller micro-batches, and ask for it."""
    # The other ranks wait in a collective operation for this one: it cannot repeat the step.
    # `hpctrain.engine.job.verdict` finds this, and lets the batch script start the ranks again.
    run.update(micro_batch_rows=smaller, lowered_in=list(ranks.attempt_key))
    log.error(
        "out of memory with micro-batches of %d rows; the run goes on from its last checkpoint "
        "with %d rows when it is started again",
        *(rows, smaller),
    )
    if ranks.launcher == "slurm" and not epochs.in_loop(run.path, ranks.attempt_key):
        requeue_from_rank(ranks.job_id)
