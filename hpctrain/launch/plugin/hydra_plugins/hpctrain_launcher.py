"""The sweeper and the launcher of `-m`, as Hydra plugins; the work is done in `hpctrain.launch`."""

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import DictConfig, open_dict


class HpctrainSweeper(BasicSweeper):
    """Hydra's basic sweeper without its check of the runs, which stops at the first error.

    The launcher checks all runs and reports all errors.
    """

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Prepare the sweep; our launcher takes the place of those of hydra-submitit-launcher."""
        from hpctrain.config.launcher_keys import is_local, is_stock

        launcher = config.hydra.launcher
        if is_stock(launcher):
            with open_dict(launcher):
                launcher.local = is_local(launcher)
                launcher._target_ = f"{HpctrainLauncher.__module__}.{HpctrainLauncher.__name__}"
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments: list[str]) -> None:
        """Launch all runs in one batch.

        If `max_batch_size` demands several, it is a ConfigError: the first would be queued before
        the others are checked.
        """
        from hpctrain.base.errors import ConfigError

        if self.max_batch_size is not None:
            raise ConfigError(
                f"hydra.sweeper.max_batch_size={self.max_batch_size}: a sweep is checked and "
                f"submitted as a whole; launch.max_running={self.max_batch_size} limits how many "
                "runs run at a time"
            )
        super().sweep(arguments)

    def _parse_config(self) -> list[str]:
        """Return `hydra.sweeper.params` as overrides; a text stays what was written."""
        from hpctrain.config.composing.compose import quoted

        return [quoted(text) for text in super()._parse_config()]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: the launcher composes each run once, before it submits any."""


class HpctrainLauncher(SlurmLauncher):  # type: ignore[misc]
    """Validates all runs of a sweep, freezes them and submits them as job arrays."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit one run for each list of overrides; if a run is wrong, none is submitted.

        A result is with `launch.wait=true` the metric of the run, otherwise None.
        """
        # Hydra imports every plugin at each start, so slow imports are here.
        from hpctrain.base.files.disk import write_atomically
        from hpctrain.base.secrets import mask, reference
        from hpctrain.config.composing.compose_sweep import Composer
        from hpctrain.launch.sweeps.sweep import Sweep

        assert self.hydra_context is not None
        assert self.config is not None
        folder = Path(str(self.config.hydra.sweep.dir))
        if initial_job_idx:  # a later batch has a folder of its own
            folder = folder.with_name(f"{folder.name}-{initial_job_idx}")
            folder.mkdir()
        note = folder / "multirun.yaml"
        if note.exists():  # the command line may hold a secret that a shell has expanded
            write_atomically(note, mask(reference(note.read_text())))
        composer = Composer(self.hydra_context.config_loader, self.config)
        local = bool(self.params.get("local"))
        metrics = Sweep.of(folder, composer, job_overrides, local=local).submit()
        returns = []
        for overrides, metric in zip(job_overrides, metrics, strict=True):
            failed = isinstance(metric, Exception)
            # Hydra prints the overrides of a run that failed.
            result = JobReturn(overrides=list(map(reference, overrides)), cfg=self.config)
            result.status = JobStatus.FAILED if failed else JobStatus.COMPLETED
            result.return_value = metric
            returns.append(result)
        return returns
