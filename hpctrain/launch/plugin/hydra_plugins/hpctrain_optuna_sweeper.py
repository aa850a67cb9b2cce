"""The sweeper `hydra/sweeper=optuna`, as a Hydra plugin; see `hpctrain.launch.sweeps.search`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from hpctrain.launch.sweeps.search import Metric


class HpctrainOptunaSweeper(Sweeper):
    """Lets Optuna propose the values of each trial; the launcher runs the trials and waits.

    The keys of its settings are explained in conf/hydra/sweeper/optuna.yaml.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings: Mapping[str, Any] = settings
        self._launched = 0

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the config and Hydra's config loader, and create the launcher."""
        self.config = config
        self.hydra_context = hydra_context
        self._launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Search the space that `arguments` and `hydra.sweeper.params` span.

        A wrong space or setting is a ConfigError; too few trials that finish are a LaunchError.
        """
        # Hydra imports every plugin at each start, so slow imports are here.
        from hpctrain.launch.sweeps.search import Search

        assert self.config is not None
        assert self.hydra_context is not None
        loader: Any = self.hydra_context.config_loader
        search = Search(self.config, self._settings, arguments, loader)
        search.run(self._launch, Path(self.config.hydra.sweep.dir))

    def _launch(
        self, batch: Sequence[Sequence[str]], parent: dict[str, str] | None
    ) -> list[Metric]:
        self._launcher.parent = parent
        returns = self._launcher.launch(batch, initial_job_idx=self._launched)
        self._launched += len(batch)
        return [result._return_value for result in returns]
