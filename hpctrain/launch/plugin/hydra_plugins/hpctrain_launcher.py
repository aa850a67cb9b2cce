"""Sweeper and launcher of `-m`, where Hydra looks for them; the work is in `hpctrain.launch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher


class HpctrainSweeper(BasicSweeper):
    """Hydra's own, less its check that stops at the first wrong run: the launcher tells all."""

    def sweep(self, arguments: list[str]) -> None:
        """Launch all runs in one batch.

        Raises:
            ConfigError: several batches are asked for; the first would be queued before the
                others are checked.
        """
        from hpctrain.errors import ConfigError

        if self.max_batch_size is not None:
            raise ConfigError(
                f"hydra.sweeper.max_batch_size={self.max_batch_size}: a sweep is checked and "
                f"submitted whole; launch.max_running={self.max_batch_size} has so many runs at a "
                "time"
            )
        super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Do nothing: the launcher composes every run, once, before any is submitted."""


class HpctrainLauncher(SlurmLauncher):  # type: ignore[misc]
    """Validates the whole sweep, freezes it, submits it as an array and returns.

    Attributes:
        parent: uid and name of the MLflow run above the runs of several batches.
    """

    parent: dict[str, str] | None = None

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit one run for each list of overrides.

        Args:
            job_overrides: command-line overrides of each run.
            initial_job_idx: number of the first one in the sweep.

        Returns:
            With `launch.wait=true` each run's metric, else nothing yet: the runs go on alone.

        Raises:
            ConfigError: any of the runs is wrong; then none is submitted.
        """
        # Hydra imports every plugin at each start, so what costs time comes here.
        from hpctrain.config.compose_sweep import Composer
        from hpctrain.disk import write_atomically
        from hpctrain.launch.sweep import Sweep
        from hpctrain.launch.table import progress
        from hpctrain.secrets import reference

        assert self.hydra_context is not None
        assert self.config is not None
        folder = Path(str(self.config.hydra.sweep.dir))
        if initial_job_idx:  # a later batch is a sweep beside the first
            folder = folder.with_name(f"{folder.name}-{initial_job_idx}")
            folder.mkdir()
        note = folder / "multirun.yaml"
        if note.exists():  # what was typed, and the shell may have put a secret into it
            write_atomically(note, reference(note.read_text()))
        sweep = Sweep(folder, self.parent)
        composer = Composer(self.hydra_context.config_loader, self.config)
        for overrides in progress(job_overrides):
            sweep.add(list(overrides), composer.typed)
        metrics = sweep.submit()
        returns = []
        for overrides, metric in zip(job_overrides, metrics, strict=True):
            failed = isinstance(metric, Exception)
            # Hydra prints the overrides of a run that failed.
            result = JobReturn(overrides=list(map(reference, overrides)), cfg=self.config)
            result.status = JobStatus.FAILED if failed else JobStatus.COMPLETED
            result.return_value = metric
            returns.append(result)
        return returns
