"""`submitit.AutoExecutor(folder, cluster="hpctrain")`: hpctrain as a plugin of submitit.

    AutoExecutor ── HpctrainExecutor ── config, calls ── SlurmExecutor, or LocalExecutor here
    a rank on Slurm ── submitit.JobEnvironment() ── HpctrainJobEnvironment

submitit finds both classes by the entry points of its group, and imports them only then.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from submitit import AutoExecutor, SlurmExecutor
from submitit.core.core import Executor
from submitit.slurm.slurm import SlurmJobEnvironment

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import private_files
from hpctrain.config.launcher_keys import is_read, unknown
from hpctrain.launch.functions import function
from hpctrain.launch.functions.function_call import Call

# Such as `time` of `slurm_time`, which is `timeout_min` for every cluster.
_COMMON = {own: common for common, own in SlurmExecutor._equivalence_dict().items()}


class HpctrainExecutor(Executor):  # type: ignore[misc]
    """Submits functions as `hpctrain.submit_function` does, to Slurm, or here where there is none.

    Args:
        folder: The `output_dir`; it must be on a file system that the nodes share.
        overrides: More keys of `launch` and `site`, as on the command line, such as `site=mine`:
            `AutoExecutor(folder, cluster="hpctrain", hpctrain_overrides=["site=mine"])`.
        config_dir: A folder with more configs, as `--config-dir`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        overrides: Sequence[str] = (),
        config_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(folder)
        self._overrides, self._config_dir = overrides, config_dir

    @classmethod
    def affinity(cls) -> int:
        """Return that it is used only where it is named."""
        return 0

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Take submitit's parameters, also with `slurm_` before them; None means not given.

        Another one is a ConfigError.
        """
        given = {}
        for name, value in kwargs.items():
            own = name.removeprefix("slurm_").removeprefix("hpctrain_")
            own = _COMMON.get(own, own)
            if not is_read(own):
                raise ConfigError(unknown(own, name))
            if value is not None:
                given[own] = value
        self.parameters.update(given)

    def _internal_process_submissions(self, delayed_submissions: Sequence[Any]) -> list[Any]:
        output = f"output_dir={self.folder}"
        with private_files():
            calls = [Call.of(each.function, each.args, each.kwargs) for each in delayed_submissions]
            config, here = function.compose(
                [*self._overrides, output], self._config_dir, self.parameters
            )
            return list(function.submit(config, calls, here))


def _all_to_ours(update: Callable[..., None]) -> Callable[..., None]:
    """Let our executor see every parameter: submitit drops `slurm_partition` without a word."""

    @functools.wraps(update)
    def updated(self: Any, **kwargs: Any) -> None:
        if isinstance(self._executor, HpctrainExecutor):
            self._executor.update_parameters(**kwargs)
        else:
            update(self, **kwargs)

    return updated


AutoExecutor._internal_update_parameters = _all_to_ours(AutoExecutor._internal_update_parameters)


class HpctrainJobEnvironment(SlurmJobEnvironment):  # type: ignore[misc]
    """`submitit.JobEnvironment()` in a function that runs on Slurm."""
