"""A hyperparameter search: Optuna proposes values, and the cluster runs `n_jobs` trials at a time.

    study (a file in OUTPUT_DIR/sweeps) ── ask ── check ── launch and wait ── metric ── tell
                                            ▲                                            │
                                            └────────────────────────────────────────────┘

A trial that fails is stored as failed, and the others go on. If the command is killed, the same
command continues the study: it launches the trials that were under way again. A run's name depends
on its config, so a trial that has finished meanwhile is not trained twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import pkgutil
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.rules import metrics
from hpctrain.errors import ConfigError, HpctrainError, LaunchError
from hpctrain.runs.freeze import check
from hpctrain.secrets import mask, reference, referenced

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

Metric = float | Exception | None
Launch = Callable[[Sequence[Sequence[str]], dict[str, str] | None], Sequence[Metric]]

# These config keys do not change what is searched, so a study is found again without them.
_NOT_IN_NAME = ("hydra", "name", "output_dir", "tracking", "launch", "site")
# Trials that are checked before the search starts, until one is valid.
_PROBES = 20


class Search:
    """A search over the overrides that are sweeps; `config` is composed with all the others.

    A wrong setting (conf/hydra/sweeper/optuna.yaml explains them) or sweep, or no Optuna, is a
    ConfigError.
    """

    def __init__(
        self,
        config: DictConfig,
        settings: Mapping[str, Any],
        arguments: Sequence[str],
        loader: ConfigLoaderImpl,
    ) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(
                "hydra/sweeper=optuna: Optuna is missing here; pip install 'hpctrain[optuna]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._config, self._settings = config, settings
        self._composer = Composer(loader, config)
        params = [f"{key}={value}" for key, value in settings["params"].items()]
        parsed = OverridesParser.create(loader).parse_overrides([*params, *arguments])
        # The command line comes last, so it replaces `params`.
        overrides = {override.get_key_element(): override for override in parsed}
        swept = {key: o for key, o in overrides.items() if o.is_sweep_override()}
        if config.launch.pack > 1:
            raise ConfigError(
                f"launch.pack={config.launch.pack} with hydra/sweeper=optuna: each worker of a "
                "search is a job of its own; leave it out"
            )
        _check(settings, config.metric, swept, overrides.pop("launch.wait", None))
        self._space = {key: _distribution(override) for key, override in swept.items()}
        self._fixed = [str(o.input_line) for key, o in overrides.items() if key not in swept]
        self._name = settings["study_name"] or self._content_name(swept.values())

    def run(self, launch: Launch, folder: Path) -> None:
        """Run `n_trials` trials, print the best and write `folder/optimization_results.yaml`.

        `launch` gets the overrides of each trial, and the uid and name of the parent run in MLflow;
        it returns the metrics. Trials that cannot be submitted, or too many failures, are an
        HpctrainError.
        """
        jobs, total = self._settings["n_jobs"], self._settings["n_trials"]
        self._probe()
        folder.mkdir(parents=True, exist_ok=True)
        if self._config.launch.dry_run:
            launch([self._overrides(trial) for trial in self._ask(self._study(None), jobs)], None)
            return
        study = self._study(self._storage())
        if "uid" not in study.user_attrs:
            study.set_user_attr("uid", uuid.uuid4().hex)
        waiting = self._under_way(study)
        if study.trials:
            done = len(study.trials) - len(waiting)
            print(f"study {self._name} continues: {done} trials done, {len(waiting)} under way")
        tried = failed = 0
        while waiting := waiting or self._ask(study, min(jobs, total - len(study.trials))):
            batch, waiting = waiting[:jobs], waiting[jobs:]
            tried += len(batch)
            failed += self._try(study, batch, launch)
            if failed / tried > self._settings["max_failure_rate"]:
                raise LaunchError(
                    f"{failed} of {tried} trials failed, more than hydra.sweeper.max_failure_rate="
                    f"{self._settings['max_failure_rate']}"
                )
        self._report(study, folder)

    def _probe(self) -> None:
        """Raise an error, before anything is written, if no trial has a valid config.

        If only some trials are invalid, these are failed trials of the search.
        """
        study = self._study(None)
        for _ in range(_PROBES):
            error = self._config_error(self._overrides(study.ask(self._space)))
            if error is None:
                return
        assert error is not None
        raise error

    def _try(self, study: Study, batch: Sequence[Trial | FrozenTrial], launch: Launch) -> int:
        """Launch the trials, store the outcomes in the study, return how many trials failed."""
        from optuna.trial import TrialState

        overrides = [self._overrides(trial) for trial in batch]
        outcomes: list[Metric] = [self._config_error(each) for each in overrides]
        valid = [index for index, outcome in enumerate(outcomes) if outcome is None]
        if valid:
            keys = " ".join(self._space)
            name = f"search {self._name} {keys}"
            parent = {"uid": study.user_attrs["uid"], "name": name, "keys": keys}
            results = launch([overrides[index] for index in valid], parent)
            for index, metric in zip(valid, results, strict=True):
                outcomes[index] = metric
        failed = 0
        for trial, outcome in zip(batch, outcomes, strict=True):
            # `skip_if_finished`: the same command may run twice at the same time.
            if isinstance(outcome, float) and math.isfinite(outcome):
                study.tell(trial.number, outcome, skip_if_finished=True)
                continue
            failed += 1
            has_error = isinstance(outcome, Exception)
            reason = outcome if has_error else f"{self._config.metric} is {outcome}"
            print(mask(f"trial {trial.number} failed: {reason}"), file=sys.stderr)
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        return failed

    def _ask(self, study: Study, count: int) -> list[Trial | FrozenTrial]:
        return [study.ask(self._space) for _ in range(count)]

    def _under_way(self, study: Study) -> list[Trial | FrozenTrial]:
        """Return the unfinished trials of a killed command that already have all values."""
        from optuna.trial import TrialState

        running = study.get_trials(states=(TrialState.RUNNING,))
        return [trial for trial in running if trial.params.keys() == self._space.keys()]

    def _overrides(self, trial: Trial | FrozenTrial) -> list[str]:
        values = [f"{key}={value}" for key, value in trial.params.items()]
        return [*self._fixed, *values, "launch.wait=true"]

    def _config_error(self, overrides: list[str]) -> HpctrainError | None:
        """Return the error in the config of a trial; None if it is valid and has the metric."""
        try:
            config = self._composer.typed(overrides)
            check(config)
        except HpctrainError as error:
            return error
        missing = list(metrics.problems(config, needed=True))
        return ConfigError("\n".join(missing)) if missing else None

    def _study(self, storage: Any) -> Study:
        import optuna

        study = optuna.create_study(
            storage=storage,
            study_name=self._name,
            direction=self._settings["direction"],
            load_if_exists=True,
        )
        sampler = {str(key): value for key, value in self._settings["sampler"].items()}
        target = str(sampler.pop("_target_"))
        # A study that is continued must not draw the same random numbers again.
        if sampler.get("seed") is not None:
            sampler["seed"] += len(study.trials)
        try:
            study.sampler = pkgutil.resolve_name(target)(**sampler)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"hydra.sweeper.sampler._target_={target}: {error}") from error
        return study

    def _storage(self) -> Any:
        if self._settings["storage"] is not None:
            return self._settings["storage"]
        from hpctrain.launch.sweeps.study_file import study_storage

        return study_storage(
            Path(self._config.output_dir).absolute() / "sweeps" / f"{self._name}.optuna"
        )

    def _content_name(self, swept: Iterable[Override]) -> str:
        """Return a name that depends on the search, so that the same command finds its study."""
        kept = [str(key) for key in self._config if key not in _NOT_IN_NAME]
        plain = OmegaConf.to_container(OmegaConf.masked_copy(self._config, kept))
        space = sorted(str(override.input_line) for override in swept)
        text = json.dumps([plain, space, self._settings["direction"]], sort_keys=True, default=str)
        text = reference(text)
        return f"{self._config.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def _report(self, study: Study, folder: Path) -> None:
        from optuna.trial import TrialState

        finished = study.get_trials(states=(TrialState.COMPLETE,))
        if not finished:
            raise LaunchError(f"none of the {len(study.trials)} trials finished; see above")
        best = study.best_trial
        found = {"name": "optuna", "best_params": best.params, "best_value": best.value}
        (folder / "optimization_results.yaml").write_text(
            yaml.safe_dump(referenced(found), sort_keys=False)
        )
        print(f"{len(finished)} of {len(study.trials)} trials of study {self._name} finished")
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        print(f"best: {self._config.metric}={best.value} (trial {best.number}): {values}")


def _check(
    settings: Mapping[str, Any], metric: str, swept: Mapping[str, Any], wait: Override | None
) -> None:
    if settings["direction"] not in ("minimize", "maximize"):
        raise ConfigError(
            f"hydra.sweeper.direction={settings['direction']}: minimize or maximize {metric}?"
        )
    for key in ("n_trials", "n_jobs"):
        if not isinstance(settings[key], int) or settings[key] < 1:
            raise ConfigError(f"hydra.sweeper.{key}={settings[key]}: it must be at least 1")
    if not swept:
        raise ConfigError(
            "hydra/sweeper=optuna has nothing to search: give one value or more as "
            "'optimizer.lr=tag(log,interval(1e-4,1e-1))', 'model.hidden=choice([64],[256,256])' "
            "or 'seed=range(0,5)'"
        )
    if wait is not None and wait.value() is not True:
        raise ConfigError(
            f"{wait.input_line}: a search needs each trial's metric before it asks for the next; "
            "leave it out"
        )


def _distribution(override: Override) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    sweep: Any = override.value()
    try:
        if isinstance(sweep, IntervalSweep):
            low: Any = sweep.start
            high: Any = sweep.end
            log = "log" in sweep.tags
            if isinstance(low, int) and isinstance(high, int):  # int(interval(1,10))
                return IntDistribution(low, high, log=log)
            return FloatDistribution(low, high, log=log)
        texts = list(override.sweep_string_iterator())
        if not isinstance(sweep, RangeSweep):
            return CategoricalDistribution(sorted(set(texts)))  # the order must not matter
        if all(text.lstrip("-").isdigit() for text in texts):
            whole = [int(text) for text in texts]
            return IntDistribution(min(whole), max(whole), step=abs(int(sweep.step)))
        numbers = [float(text) for text in texts]
        return FloatDistribution(min(numbers), max(numbers), step=abs(float(sweep.step)))
    except (ValueError, HydraException) as error:
        raise ConfigError(f"{override.input_line}: {error}") from error
