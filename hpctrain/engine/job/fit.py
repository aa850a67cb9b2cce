"""Train a frozen run directory on the ranks of this job: every way to start ends here.

python -m hpctrain …            ┐
torchrun -m hpctrain …          ├── freeze ──┐
python -m hpctrain -m …         │            ├── train(config, run, ranks)
sbatch slurm/train.sbatch …     ┘            ┘
"""

import faulthandler
import logging
import signal
import sys
from contextlib import nullcontext, suppress
from functools import partial

import torch

from hpctrain.base.extensions import offered
from hpctrain.base.forks import at_end_of_parent
from hpctrain.base.processes import marks
from hpctrain.base.processes.causes import is_out_of_memory
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm.lead_time import LeadTime, limits_s
from hpctrain.cluster.slurm.requeue import requeue_from_rank
from hpctrain.config.advice import cures
from hpctrain.config.schema import Config
from hpctrain.data.workers.pool import stacks
from hpctrain.engine.building.build import build
from hpctrain.engine.distributed import long_work
from hpctrain.engine.distributed.devices import job_gpus
from hpctrain.engine.distributed.group import process_group
from hpctrain.engine.faults.collectives import where
from hpctrain.engine.faults.health import RolledBack
from hpctrain.engine.faults.lease import lease
from hpctrain.engine.faults.observed import named_if_late
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.job.attempt import Attempt
from hpctrain.engine.parallel.precision import default_dtype
from hpctrain.engine.parts.account import Account, process_began
from hpctrain.engine.session.stepping import Outcome
from hpctrain.engine.supervised.deterministic import deterministic
from hpctrain.engine.supervised.micro_batches import MicroBatches
from hpctrain.engine.supervised.trainer import Trainer
from hpctrain.errors import ConfigError, LateRankError, MisfitError
from hpctrain.runs.code import trained_code
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.failure import recorded
from hpctrain.runs.state.stop_request import stop_file
from hpctrain.runs.terminal_log import kept
from hpctrain.tracking.journal import journal_path, last_record
from hpctrain.tracking.tracker import NullTracker

log = logging.getLogger(__name__)
_EXIT_INTERRUPTED = 130
_EXIT_TERMINATED = 143
_MODULES = frozenset(sys.modules)  # those before the first training of this process


def train(config: Config, run: RunDir, ranks: RankInfo, began: float | None = None) -> int:
    """Train the run from its last checkpoint; rank 0 holds the lock of its directory.

    The exit code is 0, or 130 or 143 when the run was stopped on request and saved. A node that has
    failed the checks of `launch.preflight` is a NodeError. Errors are recorded in the run
    directory. The attempt has `began` with this process, or at a time of `time.monotonic`.
    """
    with suppress(OSError, AttributeError):  # a notebook's stderr may be no file
        faulthandler.enable()  # says where the process died when a mapped shard was truncated
    if ranks.launcher in ("torchrun", "submitit-local"):
        # Else its ranks would outlive a launcher that is killed, and hold the run.
        at_end_of_parent(signal.SIGTERM)
    if not ranks.piece:
        offered("preflight").wait_for_gpus(config, run, ranks)
    key = ranks.attempt_key

    def end_if_over() -> None:
        for folder in ranks.folders(run.path):
            epochs.end_if_over(folder, key)

    def tell(reason: str) -> None:
        log.error("%s: this rank exits, so that the job can go on", reason)
        with suppress(LateRankError), recorded(run.path, key):
            raise LateRankError(f"rank {ranks.rank} ({ranks.host(ranks.rank)}): {reason}")

    # From here on a signal is a stop request and no longer ends the process.
    with (
        Stop(limits_s() if ranks.launcher == "slurm" else {}) as stop,
        Attempt(config, run, ranks) if ranks.is_main else nullcontext() as attempt,
        process_group(ranks, config.parallel, config.launch, run.path) as device,
        # Before the process group ends: the end of this rank lets the others fail.
        recorded(run.path, key),
        # The log of rank 0 has begun earlier; the folder exists, because rank 0 is here.
        nullcontext() if ranks.is_main else kept(run.logs, ranks),
    ):
        stop.tell = tell
        if ranks.is_main:
            count = torch.get_num_threads()
            log.info("%s on %s (torch threads: %d), %s", run.path, device, count, ranks)
            if ranks.launcher == "slurm":
                stop.due_s = LeadTime(config.launch, run.path, ranks.job_id).due_s
            stop.watch(stop_file(run.path), end_if_over)  # rank 0 holds the lock of the run
        if not ranks.piece:
            offered("preflight").check_nodes(config, run, ranks, device)
        gpus = job_gpus(device)
        with offered("monitor")(config.monitor, run.path, ranks, gpus):
            # Rank 0 knows the time of the attempts before.
            before = last_record(journal_path(run.path), "device_s") if ranks.is_main else None
            trained_s = before["device_s"] if before else 0.0
            since = process_began() if began is None else began
            account = Account(since, ranks.world_size, trained_s)
            outcome = _fit(config, run, ranks, device, attempt, stop, account)
        stop.met()
        # This happens inside the process group, whose teardown waits for rank 0: Slurm and
        # torchrun kill all ranks as soon as one has exited with a code other than 0.
        if attempt:
            attempt.ended(outcome, stop.reason)
        if outcome.finished or outcome.paused:
            return 0
        return _EXIT_INTERRUPTED if stop.reason == "SIGINT" else _EXIT_TERMINATED


def _fit(
    config: Config,
    run: RunDir,
    ranks: RankInfo,
    device: torch.device,
    attempt: Attempt | None,
    stop: Stop,
    account: Account,
) -> Outcome:
    """Train the run. The model is gone when this returns, so it ends before the process group.

    After a rollback everything is built again, as another attempt would: the trainer then loads the
    newest healthy checkpoint.

    A DistributedDataParallel that outlives its group is the last to hold it. It then ends gloo's
    threads while it holds Python's lock, and such a thread may wait for this lock for ever.
    """
    marks.open_page().where = partial(where, ranks.world_size, stacks)
    with (
        named_if_late(run.path, ranks, config.parallel.timeout_s),
        lease(long_work.store() if ranks.world_size > 1 else None, ranks.rank, ranks.master_port),
        deterministic(config.train.deterministic, device),
        default_dtype(config.precision),
    ):
        rollbacks = 0
        while True:
            account.enter("startup")
            tracker = attempt.tracker if attempt else NullTracker()
            trainer = build(config, run, ranks, device, tracker, stop, account)
            if attempt and not rollbacks:  # of a rollback the journal tells
                trainer.session.began_from = attempt.began_from
            if ranks.is_main:
                trained_code.record(config, run, _MODULES)
            with suppress(RolledBack):
                return _fitted(trainer, config, run, ranks)
            # Its successor needs the memory.
            del trainer
            rollbacks += 1


def _fitted(trainer: Trainer, config: Config, run: RunDir, ranks: RankInfo) -> Outcome:
    """Train; out of memory prepares the next attempt."""
    try:
        return trainer.fit()
    except MisfitError as error:
        code = trained_code.changes(run)
        changed = f". The code has changed: {code}" if code else ""
        raise MisfitError(
            f"{error}{changed}. Put the model back as it was; or {trained_code.CHOICE}"
        ) from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            _lower_micro_batch(config, run, ranks, trainer.micro_batches)
        if "does not have a deterministic implementation" in str(error):
            raise ConfigError(f"train.deterministic=true: {error}") from error
        raise


def _lower_micro_batch(
    config: Config, run: RunDir, ranks: RankInfo, sizes: MicroBatches | None
) -> None:
    """Let the next attempt use smaller micro-batches, and ask for it."""
    if sizes is None or (rows := sizes.smaller) is None:
        log.error("out of memory: %s", cures("one row", config, ranks.world_size))
        return
    # The other ranks wait in a collective operation for this one: it cannot repeat the step.
    # `hpctrain.engine.job.verdict` finds this, and lets the batch script start the ranks again.
    run.update(micro_batch_rows=rows, lowered_in=list(ranks.attempt_key))
    log.error(
        "out of memory with micro-batches of %d rows; the run goes on from its last checkpoint "
        "with %d rows when it is started again",
        *(sizes.rows, rows),
    )
    if ranks.launcher == "slurm" and not epochs.in_loop(run.path, ranks.attempt_key):
        requeue_from_rank(ranks.job_id)
