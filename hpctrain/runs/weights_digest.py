"""The weights that a run starts from: which files they are, and the digest that names them.

checkpoint.init_from=runs/digits-3fa92c1b
── its newest intact checkpoint ── runs/digits-3fa92c1b/checkpoints/step-00000500
── checkpoint.init_digest ── in the name of the run, and checked when the weights are loaded
"""

import logging
from pathlib import Path

from hpctrain.config.schema import CheckpointConfig
from hpctrain.errors import ConfigError, StorageError, about
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.runs.checkpoints.weight_files import WeightFiles, find_weights
from hpctrain.runs.chosen_checkpoint import chosen_checkpoint
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)
_SAID_BYTES = 4e9  # reading so many takes seconds


def pin(checkpoint: CheckpointConfig, output_dir: str) -> None:
    """Fill in the checkpoint that `checkpoint.init_from` means now, and its digest, in place.

    A config that has a digest keeps it: the weights may be gone when a run only resumes. No weights
    there are a ConfigError, damaged ones a StorageError.
    """
    if checkpoint.init_digest is not None:
        return
    try:
        files = _located(checkpoint, output_dir)
        if files.nbytes > _SAID_BYTES:
            log.info("reading %.0f GB for the digest of %s", files.nbytes / 1e9, files.path)
        checkpoint.init_digest = files.digest()
    except (ConfigError, StorageError) as error:
        raise about("checkpoint.init_from", error) from error
    checkpoint.init_from = str(files.path)


def _located(checkpoint: CheckpointConfig, output_dir: str) -> WeightFiles:
    """Return the files of `checkpoint.init_from`, which is not None, if they are weights."""
    path = Path(str(checkpoint.init_from))
    if not path.exists():  # the name of a run, as the commands take it
        path = Path(output_dir) / path.name
        if not path.exists():
            raise ConfigError(
                f"{checkpoint.init_from}: no such file or folder, and no run of that name "
                f"in {output_dir}"
            )
    if (path / "run.json").is_file():
        path = chosen_checkpoint(RunDir.open(path))
    files = find_weights(path)
    if files.tensors is None and (base := Manifest.read(path).base):
        raise ConfigError(
            f"{path} has only adapters (LoRA) of the weights {base}: "
            "`python -m hpctrain export RUN OUT --merge` makes whole weights of a run"
        )
    return files


def verified(checkpoint: CheckpointConfig, output_dir: str) -> WeightFiles:
    """Return the files of `checkpoint.init_from`, whose content is that of `init_digest`.

    No weights there are a ConfigError; damaged ones, or others than when the run was asked for, are
    a StorageError.
    """
    files, expected = _located(checkpoint, output_dir), checkpoint.init_digest
    if (digest := files.digest()) != expected:
        raise StorageError(
            f"checkpoint.init_from={files.path}: other weights ({digest}) than those of "
            f"checkpoint.init_digest={expected}; ask for the run again, and it will be another run"
        )
    return files
