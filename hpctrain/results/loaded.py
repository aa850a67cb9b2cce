"""Look at a run from Python: its config, its metrics, and its model with trained weights."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.names.step_names import step_of
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.frozen import executed, load
from hpctrain.config.identity import changeable
from hpctrain.config.rules.own_loop import check_ours
from hpctrain.config.schema import Config
from hpctrain.config.sections import LoopSections, ModelSections
from hpctrain.results.fitting_layout import fit_layout
from hpctrain.runs import trust
from hpctrain.runs.checkpoints.manifest import checkpoints
from hpctrain.runs.checkpoints.weight_files import WeightFiles
from hpctrain.runs.chosen_checkpoint import chosen_checkpoint
from hpctrain.runs.code import trained_code
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import journal

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import nn

    from hpctrain.results.trained_model import Restored

log = logging.getLogger(__name__)
_FREE = ("parallel", "launch", "network")


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
        self._intact: dict[int, Path] = {}

    def __repr__(self) -> str:
        return f"<run {self._run.name}: {self.state}>"

    @property
    def state(self) -> str:
        """The state that run.json has; "running" is wrong if the process was killed."""
        return self._run.read().state or "created"

    @property
    def result(self) -> dict[str, Any]:
        """The last step and the last metrics of a finished run; empty for other runs."""
        return self._run.read().result or {}

    @property
    def best(self) -> dict[str, Any] | None:
        """The metric, value and step of the best checkpoint; None without `checkpoint.best`."""
        best = self._run.read().best
        return None if best is None else asdict(best)

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
        return sorted(step_of(path) for path in checkpoints(self._run.checkpoints))

    def checkpoint(self, step: int | None = None, *, best: bool = False) -> Path:
        """Return the folder of a checkpoint as `model` takes it; its digests are verified once."""
        if best or step not in self._intact:
            found = chosen_checkpoint(self._run, step, best=best)
            step = step_of(found)
            self._intact[step] = found
        return self._intact[step]

    def model(self, step: int | None = None, *, best: bool = False, ema: bool = False) -> nn.Module:
        """Return the model with the weights of a checkpoint, in eval mode, on the CPU.

        It takes what the task gives it, such as scaled images: `model(*run.inputs(sample))`.
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
        from hpctrain.results.trained_model import trained_model

        self.find_code("load_run(RUN).model")
        checkpoint = self.checkpoint(step, best=best)
        return trained_model(ModelSections.of(self.config), checkpoint, ema=ema).eval()

    def inputs(self, sample: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the positional arguments of `model()` for one sample, as a batch of one.

        The transforms of an evaluation and the task's own steps, such as `task.scale`, are applied.

        Args:
            sample: The fields by name, as the data set has them: arrays without an axis of
                samples. Of windows it is one window, and images are decoded. A target is not
                needed, unless a transform wants it.

        Raises:
            ConfigError: The task is no `SplitTask`, or a field is missing.
            DataError: The data set of the run, which tells its fields, is missing.
        """
        from hpctrain.results.sample_inputs import sample_inputs

        self.find_code("load_run(RUN).inputs")
        config = self.config
        return sample_inputs(sample, config.data, config.task, config.precision, config.seed)

    def evaluate(
        self,
        split: str | None = None,
        *,
        data: str | None = None,
        step: int | None = None,
        best: bool = False,
        ema: bool | None = None,
        overrides: Sequence[str] = (),
    ) -> dict[str, float]:
        """Evaluate a checkpoint as the training does; all ranks that were started call it together.

        Args:
            split: The split; None means `data.val_split` of the run, or without `data` the fold
                that `data.fold` has held out.
            data: The folder or URL of the data set; None means that of the run.
            step: The step of the checkpoint. None means the newest one that is intact.
            best: Take the best checkpoint in place of `step`.
            ema: Whether to take the moving average of the parameters (`train.ema`); None does as
                the training, which takes it if there is one.
            overrides: `KEY=VALUE` of keys that do not change the result, such as `parallel.tp=1`.

        Returns:
            The metrics of the task by name, such as loss; the same on all ranks.

        Raises:
            ConfigError: A key or the layout does not fit, or the run has no such split.
            DataError: The data set is missing or damaged.
            StorageError: The checkpoint is missing or damaged.
        """
        self.find_code("evaluate")
        config = self._config_for(overrides, data, split, ema=ema)
        checkpoint = self.checkpoint(step, best=best)
        with self._restored(config, checkpoint) as trained:
            return trained.evaluate()

    def predict(
        self,
        data: str | None,
        out: str | Path,
        split: str | None = None,
        *,
        step: int | None = None,
        best: bool = False,
        ema: bool | None = None,
        overrides: Sequence[str] = (),
    ) -> Path:
        """Write what the model says about each sample, as a data set that a loader reads.

        All ranks that were started call it together.

        Args:
            data: The folder or URL of the data set; None means that of the run.
            out: The folder of the predictions, new or empty.
            split: As `evaluate`.
            step: The step of the checkpoint. None means the newest one that is intact.
            best: Take the best checkpoint in place of `step`.
            ema: As `evaluate`.
            overrides: `KEY=VALUE` of keys that do not change the result, such as `parallel.tp=1`.

        Returns:
            The folder. Sample i of its split is the prediction for sample i of the data's split, or
            of the samples of the fold, in their order.

        Raises:
            ConfigError: A key, the layout or the task does not fit.
            DataError: The data set is missing or damaged.
            StorageError: The folder has files, or the checkpoint is missing or damaged.
        """
        from hpctrain.data.places.placement import load_index
        from hpctrain.results.predictor import Prediction

        self.find_code("predict")
        config = self._config_for(overrides, data, split, ema=ema, whole_outputs=True)
        checkpoint = self.checkpoint(step, best=best)
        facts = {
            "run": self._run.name,
            "checkpoint": WeightFiles(checkpoint, None).digest(),
            "data": load_index(config.data.path).digest,
            "split": config.data.evaluated,
            "ema": config.train.ema is not None,
        }
        folder = Path(os.path.abspath(out))
        with self._restored(config, checkpoint, whole_outputs=True) as trained:
            Prediction(trained, folder, facts).write()
        return folder

    def _config_for(
        self,
        overrides: Sequence[str],
        data: str | None,
        split: str | None,
        *,
        ema: bool | None = None,
        whole_outputs: bool = False,
    ) -> Config:
        """Return the config with another data set and layout; the result is not changed.

        The layout is that of the training, unless it does not fit; see `fit_layout`. If a rank must
        have `whole_outputs` of the model, a layout that divides them is a ConfigError.
        """
        free = tuple(f"{name}." for name in changeable())
        if wrong := [o for o in overrides if not f"{o.partition('=')[0]}.".startswith(free)]:
            raise ConfigError(
                f"{wrong[0]}: the result would be another one; only keys of {', '.join(_FREE)} and "
                "the like change here"
            )
        config = load(self._run.config_file, overrides)
        if not any(text.startswith("parallel.") for text in overrides):
            ranks = RankInfo.from_env()
            config.parallel, changed = fit_layout(
                config.parallel, ranks.world_size, whole_outputs=whole_outputs
            )
            if changed and ranks.is_main:
                log.warning("%s", changed)
        if ema and config.train.ema is None:
            raise ConfigError("ema: the run has no average of its parameters (train.ema)")
        if ema is False:
            config.train.ema = None
        if data is not None:
            config.data.path = data if "://" in data else os.path.abspath(data)
        if split is not None or data is not None:  # another one than the fold that was held out
            config.data.val_split, config.data.fold = split or config.data.val_split, None
        if config.data.evaluated is None:
            raise ConfigError("data.val_split=null: the run has no evaluation; give --split NAME")
        pp, cp = config.parallel.pp, config.parallel.cp
        if whole_outputs and (pp > 1 or cp > 1):
            raise ConfigError(
                f"predict with parallel.pp={pp} and parallel.cp={cp}: no rank has whole outputs; "
                "leave them out, and the ranks are data parallel (a checkpoint of any layout fits)"
            )
        return config

    @contextmanager
    def _restored(
        self, config: Config, checkpoint: Path, *, whole_outputs: bool = False
    ) -> Iterator[Restored]:
        """Yield the model on the ranks that were started; see `restored`."""
        from hpctrain.results.trained_model import restored

        folder = self.path / "evaluations"  # it keeps the secret by which ranks know each other
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be made ({error.strerror})") from error
        given = LoopSections.of(config), config.launch
        with restored(*given, checkpoint, folder, divided_loss=not whole_outputs) as trained:
            yield trained

    def find_code(self, what: str) -> None:
        """Let imports that fail find the copy of the code that the run was submitted with.

        It is said if what is found is not the code that the run was trained with. `what` needs it.

        Raises:
            ConfigError: The run belongs to somebody who is not trusted (`hpctrain.runs.trust`), or
                has a loop of its own.
        """
        check_ours(self.config, what)
        copy = self._run.code_copy
        trust.check(self.path, executed(self.config), copy)
        kept = None if copy is None else Snapshot.load(copy)
        code = [str(folder) for folder in kept.pythonpath] if kept else []
        sys.path += [folder for folder in code if folder not in sys.path]
        if RankInfo.from_env().is_main and (changed := trained_code.changes(self._run)):
            text = "%s was trained with other code than that of now: %s"
            log.warning(text, self._run.name, changed)
