"""Look at a run from Python: its config, its metrics, and its model with trained weights."""

from __future__ import annotations

import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.manifest import checkpoints
from hpctrain.config.frozen import load
from hpctrain.runs.chosen_checkpoint import chosen_checkpoint
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import journal

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


class LoadedRun:
    """A run directory, read-only.

    Args:
        path: The run directory.

    Attributes:
        path: The absolute path of the run directory.
        config: The frozen config.

    Raises:
        StorageError: It is no run directory, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._run = RunDir.open(path)
        self.path, self.config = self._run.path, load(self._run.config_file)

    def __repr__(self) -> str:
        return f"<run {self._run.name}: {self.state}>"

    @property
    def state(self) -> str:
        """The state that run.json has; "running" is wrong if the process was killed."""
        return str(self._run.read().get("state", "created"))

    @property
    def result(self) -> dict[str, Any]:
        """The last step and the last metrics of a finished run; empty for other runs."""
        return self._run.read().get("result") or {}

    @property
    def best(self) -> dict[str, Any] | None:
        """The metric, value and step of the best checkpoint; None without `checkpoint.best`."""
        return self._run.read().get("best")

    @property
    def metrics(self) -> pd.DataFrame:
        """All tracked metrics, one row for each value, with the columns step, key and value.

        They come from the journal, without a server. Metrics that a resumed attempt has superseded
        are left out. `metrics.pivot(index="step", columns="key", values="value")` has one column
        for each key.
        """
        import pandas as pd

        from hpctrain.tracking import columns

        steps, keys, values = columns.read(journal.journal_path(self.path))
        return pd.DataFrame({"step": steps, "key": keys, "value": values})

    @cached_property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return sorted(int(path.name[5:]) for path in checkpoints(self._run.checkpoints))

    def model(self, step: int | None = None, *, best: bool = False, ema: bool = False) -> nn.Module:
        """Return the model with the weights of a checkpoint, in eval mode, on the CPU.

        Its class is imported as by any Python code here. If that fails, it is imported from the
        copy of the code that the run was submitted with.

        Args:
            step: The step of the checkpoint. None means the newest one that is intact.
            best: Take the best checkpoint, which `checkpoint.best` keeps, in place of `step`.
            ema: Take the moving average of the parameters, which `train.ema` keeps.

        Raises:
            ConfigError: The model cannot be built.
            StorageError: The checkpoint is missing or damaged.
        """
        from hpctrain.job.building.trained_model import trained_model

        checkpoint = chosen_checkpoint(self._run, step, best=best)
        sys.path += [folder for folder in self._code() if folder not in sys.path]
        return trained_model(self.config, checkpoint, ema=ema).eval()

    def _code(self) -> list[str]:
        from hpctrain.runs.code.snapshot import Snapshot

        digest = self._run.read().get("code")
        kept = Snapshot.load(self.path.parent / "code" / str(digest)) if digest else None
        return [str(folder) for folder in kept.pythonpath] if kept else []
