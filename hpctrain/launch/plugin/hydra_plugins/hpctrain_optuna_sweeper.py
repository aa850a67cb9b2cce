"""The sweeper `hydra/sweeper=optuna`, where Hydra looks for it; see `hpctrain.launch.search`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from hpctrain.launch.search import Metric


class HpctrainOptunaSweeper(Sweeper):
    """Lets Optuna propose each trial's values; the launcher runs them and waits.

    Args:
        settings: conf/hydra/sweeper/optuna.yaml tells what each means.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings: Mapping[str, Any] = settings
        self._launched = 0

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra has: its config loader, our launcher and the command's config."""
        self.config = config
        self.hydra_context = hydra_context
        self._launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Search the space that `arguments` and `hydra.sweeper.params` span.

        Raises:
            ConfigError: the space or a setting is wrong.
            LaunchError: no trial finished, or too many failed.
        """
        # Hydra imports every plugin at each start, so what costs time comes here.
        from hpctrain.launch.search import Search

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
