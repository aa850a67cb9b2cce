"""The model of a run with the weights that it has trained.

a checkpoint ┬─ restored ────── on the ranks that were started, with other data or batches
             └─ trained_model ─ a new one in this process alone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.terminal.progress_bar import ProgressBar
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import CheckpointConfig, LaunchConfig, LoRAConfig
from hpctrain.config.sections import LoopSections, ModelSections
from hpctrain.data.generators import seeded_generators
from hpctrain.engine.building.build_model import stages_of, start_weights
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.building.parts import Parts
from hpctrain.engine.checkpoint.starting_point import first_names, names_of_base, weights_of
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.engine.distributed.group import process_group
from hpctrain.engine.parallel.precision import default_dtype
from hpctrain.engine.parallel.preparing.whole_model import cast_parameters, freeze, with_adapters
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.supervised.evaluations import evaluate
from hpctrain.engine.tasks.task import TaskState
from hpctrain.results.fitting_layout import fit_batch
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.runs.checkpoints.matching import misshapen
from hpctrain.runs.checkpoints.weight_files import WeightFiles
from hpctrain.runs.chosen_checkpoint import verified

_FIRST_S = 2.0  # until the line that estimates the time


def trained_model(sections: ModelSections, checkpoint: Path, *, ema: bool = False) -> nn.Module:
    """Return the model of a run, in training mode, on the CPU.

    With `ema` it has the moving average of the parameters (`train.ema`).
    """
    lora, start = sections.lora, sections.start
    # What the constructor draws and no checkpoint has is that of the training.
    with default_dtype(sections.precision), seeded_generators(sections.seed):
        model = with_adapters(instantiate("model", sections.model), lora)
    if sections.precision.params == "fp64":
        cast_parameters(model, torch.float64)
    if lora.patterns:
        freeze(model, sections.optimizer, sections.blocks, lora)
        if lora.quantize:
            offered.quantized.release(model, torch.device("cpu"))
    _load_trained(model, checkpoint, start, lora, sections.output_dir, ema=ema)
    return model


def check_base(start: CheckpointConfig, checkpoint: Path) -> None:
    """Check that the adapters belong to the weights of `start`; others are a StorageError."""
    base = Manifest.read(checkpoint).base
    if base != start.init_digest:
        raise StorageError(
            f"{checkpoint} has adapters of other weights ({base or 'none'}) than those of "
            f"checkpoint.init_digest={start.init_digest}"
        )


def _load_trained(
    module: nn.Module,
    checkpoint: Path,
    start: CheckpointConfig,
    lora: LoRAConfig,
    output_dir: str,
    stages: dist.ProcessGroup | None = None,
    *,
    ema: bool,
) -> None:
    """Load the weights of a checkpoint, and those that its adapters belong to.

    With a pipeline all its `stages` call this.
    """
    if lora.patterns:
        check_base(start, checkpoint)
        start_weights(start, module, verified(start, output_dir), stages)
        if lora.quantize:
            offered.quantized.quantize(module)
    load_weights(module, checkpoint, ema=ema, trained_only=bool(lora.patterns))


def load_weights(
    model: nn.Module, checkpoint: Path, *, ema: bool = False, trained_only: bool = False
) -> None:
    """Load the weights of a checkpoint of the same model, in place; each rank does it alone.

    `ema` takes the moving average of the parameters (`train.ema`); those that were frozen, and
    buffers, are the model's. Where the ranks had models that differ (local SGD), rank 0's is taken.
    With `trained_only` the checkpoint lacks the weights of the base (LoRA), which are left as they
    are.
    """
    weights, own = open_weights(WeightFiles(checkpoint, None)), weights_of(model)
    if trained_only:
        left_out = names_of_base(model)
        own = {name: value for name, value in own.items() if name not in left_out}
    firsts = first_names(model)
    found = {name: value for name, value in own.items() if name in weights.shapes}
    # A parameter with two names, as in tied embeddings, may be saved under one of them.
    loaded = {firsts.get(name, name) for name in found}
    for name in own:
        if firsts.get(name, name) not in loaded:
            raise StorageError(f"{checkpoint} has no {name}: it is the checkpoint of another model")
    for name, value in found.items():
        there, here = weights.shapes[name], tuple(value.shape)
        if there != here:
            raise StorageError(
                f"{checkpoint} is the checkpoint of another model: {misshapen(name, there, here)}"
            )
    weights.load(found)
    if ema:
        average = open_weights(WeightFiles(checkpoint, None), "ema")
        if not average.shapes:
            raise StorageError(
                f"{checkpoint} has no average of the parameters: only runs with train.ema keep one"
            )
        average.load({name: value for name, value in own.items() if name in average.shapes})


@dataclass(frozen=True)
class Restored:
    """A trained model on its ranks, in eval mode, and what it is used with."""

    parts: Parts
    model: ParallelModel

    def evaluate(self) -> dict[str, float]:
        """Return the mean of each metric over the split; all ranks call this together.

        Each sample counts once, as in the evaluations of the training.
        """
        feed = self.parts.data.evaluation()
        assert feed is not None
        count = feed.loader.count
        try:
            with self.progress(count, "evaluated ") as shown:

                def is_over() -> bool:
                    shown.advance(min(feed.last.group.batch_size, count - shown.samples), 0)
                    return False

                means = evaluate(self.model, self.parts.task, feed, is_over, checks=True)
        finally:
            feed.close()
        assert means is not None
        return means

    def progress(self, samples: int, label: str) -> ProgressBar:
        """Return the progress over so many samples of all ranks, which rank 0 shows on stderr."""
        quiet = not self.parts.ranks.is_main
        return ProgressBar(samples, 0, label=label, quiet=quiet, first_s=_FIRST_S)


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
        _load_trained(
            *(model.module, checkpoint, config.checkpoint, config.train.lora, config.output_dir),
            stages_of(model),
            ema=config.train.ema is not None,
        )
        saved = Manifest.read(checkpoint)
        model.step = saved.step
        TaskState(parts.task).load_state_dict(saved.progress.get("task"))
        model.module.eval()
        yield Restored(parts, model)
        del model
