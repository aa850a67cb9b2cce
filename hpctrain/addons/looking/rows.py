"""Which rows count: those of a rank, those of a micro-batch, and those that only fill up a batch.

buffers   written from the rows of one rank or micro-batch: not those of one process
mask      rows whose mask is False change a sum: evaluations depend on the number of ranks
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from hpctrain.addons.looking.trial import TrialPasses, near, other_rows
from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed import objects
from hpctrain.engine.layers.dry_run import stored_buffers
from hpctrain.engine.parallel.preparing.batch_norm import FILLED_UP, depending
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.tasks.task import Task, name_of

log = logging.getLogger(__name__)


def check_buffers(trial: TrialPasses, model: ParallelModel, *, filled: bool) -> None:
    """Say which buffers a forward pass writes from the rows that it sees.

    Rank 0 warns if these are not the rows of the whole batch. If training batches are `filled` up,
    it is a ConfigError. Layers of batch norm are judged when the model is prepared.
    """
    mesh, parts = model.mesh, model.accumulate
    norms = tuple(f"{name.removeprefix('module.')}." for name, _ in depending(model.module))
    own = (name.removeprefix("module.") for name, _ in stored_buffers(model.module))
    if not any(objects.all_gather(any(not name.startswith(norms) for name in own))):
        return
    first = trial(train=True).buffers
    mine = {name: _digest(value) for name, value in first.items() if not name.startswith(norms)}
    ranks = objects.all_gather([mesh.pp_rank, mesh.tp_rank, mine])
    if not any(written for *_, written in ranks):
        return
    alike = [written for *place, written in ranks if place == [mesh.pp_rank, mesh.tp_rank]]
    across = {name for name in mine if len({each.get(name) for each in alike}) > 1}
    all_of_one_row = {name: values[:1].expand_as(values) for name, values in trial.batch.items()}
    second = trial({**all_of_one_row, "mask": trial.batch["mask"]}, train=True).buffers
    within = {n for n in mine if n not in second or not torch.equal(first[n], second[n])}
    found = objects.all_gather([_with_kinds(model, across), _with_kinds(model, across | within)])
    across, within = ({name for rank in found for name in rank[i]} for i in (0, 1))
    if filled and within:
        raise ConfigError(
            f"{FILLED_UP} {few(sorted(within), 1)}, a buffer that the forward pass writes, would "
            "count them: use data.tail=drop, or a train.global_batch_size that divides the samples "
            "of an epoch"
        )
    seen = []
    if across and not model.replicas_differ:
        seen.append(f"one of {mesh.dp_cp_size} data-parallel ranks")
    if within and parts > 1:
        seen.append(f"one of {parts} micro-batches")
    if seen and dist.get_rank() == 0:
        log.warning(
            "the forward pass writes the buffer %s from the rows that %s has, so losses differ "
            "from those of one process that sees whole batches: add up over the ranks what it is "
            "computed from (torch.distributed.all_reduce in the forward pass), use "
            "train.accumulate=1, or keep it as a parameter that is trained",
            *(few(sorted(within), 1), " and ".join(seen)),
        )


def check_evaluated(model: ParallelModel, task: Task, batch: Batch) -> None:
    """See `check_mask`; the batch is one of an evaluation."""
    check_mask(TrialPasses(model, task, batch), task, in_training=False)


def check_mask(trial: TrialPasses, task: Task, *, in_training: bool) -> None:
    """Refuse a task in whose sums rows count that only fill up a batch.

    Every second row is masked. It may then have any content. Both halves must add up to the whole;
    if they do not, although the counts do, rows depend on each other, and rank 0 warns.
    """
    batch = trial.batch
    masked = torch.arange(len(batch["mask"]), device=batch["mask"].device) % 2 == 1
    one, other = ({**batch, "mask": batch["mask"] & rows} for rows in (~masked, masked))
    problem = warning = ""
    for train in (False, True)[: 1 + in_training]:
        kept, changed = trial(one, train=train), trial(other_rows(one, masked), train=train)
        if names := kept.unlike(changed, trial.tolerance):
            problem = problem or f"its {few(names)} changes with rows whose mask is False"
    first, rest, whole = trial(one, train=False), trial(other, train=False), trial(train=False)
    for name, (total, count) in whole.sums.items():
        (a, m), (b, n) = first.sums[name], rest.sums[name]
        if not count or not m + n:
            continue
        alone = len(masked) == 1 and n != 0  # the one row that there is was masked
        if near(((a + b) / (m + n), 1), (total / count, 1), 0.01) and not alone:
            continue
        per_batch = count == 1 and name != "loss" and len(masked) > 1
        if near((m, n), (count, count), trial.tolerance) and not per_batch:
            problem = problem or f"the count of its {name} has rows whose mask is False"
        else:
            warning = warning or name
    found = objects.all_gather([problem, warning])
    if problem := next((text for text, _ in found if text), ""):
        raise ConfigError(
            f"task._target_={name_of(task)}: {problem}. Such rows only fill up a batch, as the "
            "last one of an evaluation, so that metrics would depend on the number of ranks: "
            'multiply what each row gives by batch["mask"] before it is added up, and count '
            "mask.sum(). If the model lets rows see each other, as a norm over the batch does, use "
            "a train.global_batch_size that divides the samples"
        )
    if (name := next((text for _, text in found if text), "")) and dist.get_rank() == 0:
        log.warning(
            "task._target_=%s: the %s of a batch is not that of its two halves together: its rows "
            "depend on each other, as in a contrastive loss, so it depends on how ranks and "
            "micro-batches divide a batch",
            *(name_of(task), name),
        )


def _digest(value: torch.Tensor) -> str:
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(content.numpy().tobytes())


def _with_kinds(model: ParallelModel, names: set[str]) -> list[str]:
    """Return names of buffers of this rank, each with the class of its module."""
    modules: dict[str, Any] = {
        name.removeprefix("module."): module for name, module in model.module.named_modules()
    }
    kinds = {name: type(modules[name.rpartition(".")[0]]).__name__ for name in names}
    # FSDP2 makes a class of its own.
    return [f"{name} ({kind.removeprefix('FSDP')})" for name, kind in kinds.items()]
