"""The sweeper `hydra/sweeper=optuna`, as a Hydra plugin; see `hpctrain.search.search`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class HpctrainOptunaSweeper(Sweeper):
    """Lets Optuna propose the values of each trial, and workers train the trials.

    The keys of its settings are explained in conf/hydra/sweeper/optuna.yaml.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings: Mapping[str, Any] = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the config and Hydra's config loader."""
        self.config = config
        self.hydra_context = hydra_context

    def sweep(self, arguments: list[str]) -> None:
        """Search the space that `arguments` and `hydra.sweeper.params` span.

        A wrong space or setting is a ConfigError; too few trials that finish are a LaunchError.
        """
        # Hydra imports every plugin at each start, so slow imports are here.
        from hpctrain.search.search import Search

        assert self.config is not None
        assert self.hydra_context is not None
        loader: Any = self.hydra_context.config_loader
        search = Search(self.config, self._settings, arguments, loader)
        search.run(Path(self.config.hydra.sweep.dir))
