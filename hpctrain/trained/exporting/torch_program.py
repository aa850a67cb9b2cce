"""Writes a trained model as a program of torch.export, which runs without its Python code.

model with weights ── inputs of two samples ── torch.export ── model.pt2, for any number of samples
"""

from pathlib import Path

import torch

from hpctrain.config.schema import ParallelConfig
from hpctrain.errors import ConfigError
from hpctrain.tasks import SplitTask
from hpctrain.trained.loaded import LoadedRun
from hpctrain.trained.restored import restored

FILE = "model.pt2"
_ROWS = 2


def write_program(run: LoadedRun, checkpoint: Path, out: Path) -> None:
    """Write `out/model.pt2`; the inputs are those of the first samples of `data.val_split`.

    The program maps the inputs of the task, whose first axis may have any length, to the outputs of
    the model in eval mode. Without an evaluation split or a cut between model and loss, or if
    torch.export cannot follow the model, it is a ConfigError.
    """
    config = run.config
    config.parallel = ParallelConfig(device="cpu")
    if config.data.evaluated is None:
        raise ConfigError("--torch-export: data.val_split=null, but it needs a sample of the data")
    with restored(config, checkpoint, run.meeting_folder()) as trained:
        if not isinstance(task := trained.parts.task, SplitTask):
            raise ConfigError(
                f"--torch-export: task._target_={config.task.get('_target_')} is no "
                "hpctrain.tasks.SplitTask, so the inputs of the model are not known"
            )
        feed = trained.parts.data.in_order(_ROWS)
        try:
            inputs = task.inputs(next(iter(feed)))
        finally:
            feed.close()
        shapes = tuple({0: torch.export.Dim.AUTO} for _ in inputs)
        try:
            program = torch.export.export(trained.model.module, inputs, dynamic_shapes=shapes)
        except Exception as error:  # torch raises many kinds
            reason = " ".join(str(error).split())[:500]
            raise ConfigError(
                f"--torch-export: torch.export cannot follow the model: {reason}"
            ) from error
        program.example_inputs = None  # the samples would be written, too
        torch.export.save(program, out / FILE)
