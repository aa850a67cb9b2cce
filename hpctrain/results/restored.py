"""The model of a run on the ranks that were started, with the weights of a checkpoint.

config of the run ── other ranks, other data ── parallelize ── weights of the checkpoint
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.terminal.progress_bar import ProgressBar
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import LaunchConfig
from hpctrain.config.sections import LoopSections
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.engine.building.parts import Parts
from hpctrain.engine.distributed.group import process_group
from hpctrain.engine.parallel.precision import default_dtype
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.supervised.evaluations import evaluate
from hpctrain.engine.tasks.task import TaskState
from hpctrain.errors import ConfigError
from hpctrain.results.fitting_layout import fit_batch
from hpctrain.results.trained_model import load_trained
from hpctrain.runs.checkpoints.manifest import Manifest

_FIRST_S = 2.0  # until the line that estimates the time


@dataclass(frozen=True)
class Restored:
    """A trained model on its ranks, in eval mode, and what it is used with."""

    parts: Parts
    model: ParallelModel

    def evaluate(self, feed: DevicePrefetcher) -> dict[str, float]:
        """Return the mean of each metric over a feed, and close it; all ranks call this together.

        Each sample counts once, as in the evaluations of the training.
        """
        count = feed.loader.count
        try:
            with self.progress(count, "evaluated ") as shown:

                def is_over() -> bool:
                    shown.advance(min(feed.batch_size, count - shown.samples), 0)
                    return False

                means = evaluate(self.model, self.parts.task, feed, is_over, checks=True)
        finally:
            feed.close()
        assert means is not None
        return means

    @contextmanager
    def progress(self, samples: int, label: str) -> Iterator[ProgressBar]:
        """Yield the progress over so many samples of all ranks, which rank 0 shows on stderr."""
        ranks = self.parts.ranks
        progress = ProgressBar(samples, 0, label=label, quiet=not ranks.is_main, first_s=_FIRST_S)
        with progress as shown:
            yield shown


@contextmanager
def restored(
    config: LoopSections,
    launch: LaunchConfig,
    checkpoint: Path,
    folder: Path,
    *,
    divided_loss: bool = True,
) -> Iterator[Restored]:
    """Yield the model of a run on the ranks that were started; all ranks call this together.

    Its parameters are those with which the training evaluates: their average, where it does so.
    Batch sizes are fitted to the ranks. `folder` keeps the secret by which the ranks know each
    other. With `divided_loss`, tensor parallel may leave the logits divided.
    """
    ranks = RankInfo.from_env()
    try:
        degrees = Degrees.of(config.parallel, ranks.world_size)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nThe run was trained in another layout; a checkpoint fits any: give one for "
            "these ranks, such as parallel.tp=1 parallel.pp=1"
        ) from error
    fit_batch(config.train, config.parallel, degrees)
    with (
        process_group(ranks, config.parallel, launch, folder) as device,
        default_dtype(config.precision),
    ):
        parts = Parts(config, ranks, device)
        model = parts.model(divided_loss=divided_loss, trains=False)
        load_trained(config.checkpoint, config.train, config.output_dir, checkpoint, model)
        saved = Manifest.read(checkpoint)
        model.step = saved.step
        TaskState(parts.task).load_state_dict(saved.progress.get("task"))
        model.module.eval()
        yield Restored(parts, model)
        del model
