"""Write the model of a finished run as MLflow stores models, with its signature.

    python -m hpctrain.trained.mlflow_model RUN_DIR OUT

The uploader runs this program at the end of a run with `tracking.log_model=true`, and puts the
folder OUT on the run's page. The model is exported as a graph (torch.export), so that loading it
needs none of the run's code, and runs none.
"""

import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hpctrain.config.schema import ParallelConfig
from hpctrain.distributed.group import process_group
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.job.building.parts import Parts
from hpctrain.models.dry_run import dry_run
from hpctrain.parallel.precision import default_dtype, wide_batch
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.secrets import mask
from hpctrain.shards.types import Array
from hpctrain.tasks.task import SplitTask
from hpctrain.trained.loaded import LoadedRun

_SAMPLES = 2  # torch.export takes a dimension of 1 as a constant


def write(run_dir: Path, out: Path) -> None:
    """Write the best model of a run, or else that of its last checkpoint, into a new folder."""
    loaded = LoadedRun(run_dir)
    model = loaded.model(best=loaded.best is not None)
    inputs = _inputs(loaded)
    try:
        _save(model, inputs, out)
    except Exception as error:  # torch.export has errors of many classes
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"tracking.log_model=true: torch.export cannot export this model: {reason}"
        ) from error


def _inputs(loaded: LoadedRun) -> list[Array]:
    """Return the positional arguments of the model for a few samples of the run's data."""
    config, alone = loaded.config, RankInfo.from_env({"HPCTRAIN_LAUNCHER": "single"})
    # One process on the CPU, and no copy of the shards on this node.
    config.parallel = ParallelConfig(device="cpu")
    config.data.stage, config.data.workers = "none", 0
    config.train.accumulate, config.train.micro_batch_size = 1, None
    config.train.global_batch_size, config.train.batch_size_ramp = _SAMPLES, []
    with process_group(alone, config.parallel) as device, default_dtype(config.precision):
        parts = Parts(config, alone, device)
        if not isinstance(task := parts.task, SplitTask):
            raise ConfigError(
                f"tracking.log_model=true: task._target_={config.task.get('_target_')} is no "
                "hpctrain.tasks.SplitTask, so nothing tells what the model's inputs are"
            )
        feed = parts.data.evaluation() or parts.data.training()
        try:
            batch = wide_batch(next(iter(feed)))
            return [_array(value[:_SAMPLES]) for value in task.inputs(batch)]
        finally:
            feed.close()


def _save(model: nn.Module, inputs: list[Array], out: Path) -> None:
    import mlflow.pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    with dry_run(model), torch.no_grad():
        outputs = model(*map(torch.from_numpy, inputs))
    names = [None] if len(inputs) == 1 else [f"input_{i}" for i in range(len(inputs))]
    pairs = zip(inputs, names, strict=True)
    given = [TensorSpec(x.dtype, (-1, *x.shape[1:]), name) for x, name in pairs]
    returned = None
    if torch.is_tensor(outputs):
        returned = Schema([TensorSpec(_array(outputs).dtype, (-1, *outputs.shape[1:]))])
    example = inputs[0] if len(inputs) == 1 else tuple(inputs)
    mlflow.pytorch.save_model(
        model,
        str(out),
        signature=ModelSignature(Schema(given), returned),
        input_example=example,
        serialization_format="pt2",
        pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
    )


def _array(value: torch.Tensor) -> Array:
    value = value.detach().cpu()
    return np.asarray(value.float() if value.dtype == torch.bfloat16 else value)


def main(argv: list[str]) -> int:
    """Write the model; print what is wrong as the last line of standard error."""
    warnings.simplefilter("ignore")  # of libraries, which help nobody here
    logging.disable(logging.WARNING)
    run_dir, out = map(Path, argv)
    try:
        write(run_dir, out)
    except HpctrainError as error:
        print(mask(" ".join(str(error).split())), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
