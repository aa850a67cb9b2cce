"""Weights & Biases: the metrics and images of a run, online or as files for `wandb sync`.

All attempts are one run of W&B, whose id is that of hpctrain. W&B cannot take values back, so where
an attempt repeats steps, W&B keeps the values that it has, and MLflow gets the new ones.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.tracking.tracker import OtherTracker

_STEP = "global_step"


class WeightsAndBiases(OtherTracker):
    """Log to W&B. Its API key is read from the environment, WANDB_API_KEY, as always.

    Args:
        project: The project of the run.
        entity: The user or team; None means the default of the account.
        mode: "online", or "offline" for nodes without a network: then the files are in the folder
            `wandb` of the run directory, and `wandb sync` uploads them. None means WANDB_MODE, or
            online.
        options: More arguments of `wandb.init`, such as `tags` and `group`.

    Raises:
        ConfigError: The package `wandb` is missing, or the mode is unknown.
    """

    def __init__(
        self,
        project: str = "hpctrain",
        entity: str | None = None,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if find_spec("wandb") is None:
            raise ConfigError("it needs the package wandb: pip install 'hpctrain[wandb]'")
        if mode not in (None, "online", "offline"):
            raise ConfigError(f"mode={mode}: allowed are null, online and offline")
        self._given = {"project": project, "entity": entity, "mode": mode, **(options or {})}
        self._logged: Mapping[str, int] = {}
        self._run: Any = None

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin the run of W&B, or continue it."""
        import wandb

        self._run = wandb.init(
            id=self.uid,
            name=self.run_name,
            dir=str(self.run_dir),
            config=dict(params),
            resume="allow",
            # hpctrain has logs of its own, and W&B would take stdout and stderr of the training.
            settings=wandb.Settings(console="off", silent=True),
            **self._given,
        )
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("*", step_metric=_STEP)

    def rewind_to(self, step: int, logged: Mapping[str, int]) -> None:
        """Remember what W&B has already of the steps that are repeated."""
        self._logged = logged

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step, but for those that W&B has of this step."""
        new = {key: value for key, value in metrics.items() if self._is_new(key, step)}
        if new:
            self._run.log({_STEP: step, **new})

    def log_image(self, key: str, image: Any, step: int) -> None:
        """Log an image; see `hpctrain.tracking.page.images`."""
        from hpctrain.tracking.page.images import picture

        self._log_image(key, picture(key, image), step)

    def log_figure(self, key: str, figure: Any, step: int) -> None:
        """Log a figure of matplotlib as an image."""
        self._log_image(key, figure, step)

    def finish(self, status: str = "FINISHED", *_: Any, **__: Any) -> None:
        """End the run of W&B, or this attempt of it."""
        if self._run is not None:
            self._run.finish(exit_code=1 if status in ("FAILED", "KILLED") else 0)
            self._run = None

    def _log_image(self, key: str, content: Any, step: int) -> None:
        import wandb

        if self._is_new(key, step):
            self._run.log({_STEP: step, key: wandb.Image(content)})

    def _is_new(self, key: str, step: int) -> bool:
        return step > self._logged.get(key, -1)
