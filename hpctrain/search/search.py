"""The command of a search: check it, begin or find its study, and start its workers.

    -m hydra/sweeper=optuna … ── settings, space, a valid trial ── study, search.json, bases
                                                             workers: an array, or one here ──┘

The workers need nobody: after the submission the command returns. The same command again finds the
study, and adds workers as far as fewer than `n_jobs` live.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.launcher_keys import is_local
from hpctrain.config.schema import Config, LaunchConfig
from hpctrain.errors import ConfigError, HpctrainError, LaunchError
from hpctrain.launch import local_runs
from hpctrain.launch.entry import Entry
from hpctrain.launch.output import say
from hpctrain.launch.sweeps.before_queueing import notes
from hpctrain.launch.sweeps.run_code import say_copy
from hpctrain.launch.sweeps.unmatched import unmatched
from hpctrain.lock import why_no_locks
from hpctrain.record import written
from hpctrain.runs import budget
from hpctrain.runs.code import provenance, snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.search import study as studies
from hpctrain.search import worker_arrays
from hpctrain.search.rule import NOTHING_LEFT
from hpctrain.search.search_file import SearchFile
from hpctrain.search.settings import Settings
from hpctrain.search.space import check_keys, distributions
from hpctrain.search.trial_config import Bases
from hpctrain.search.trials import Found
from hpctrain.secrets import mask, reference, referenced
from hpctrain.slurm import sbatch
from hpctrain.slurm.queue import UnreachableError

if TYPE_CHECKING:
    from optuna import Study

# These config keys do not change what is searched, so a study is found again without them.
_NOT_IN_NAME = ("hydra", "name", "output_dir", "tracking", "launch", "site")
# Trials that are checked before the search starts, until one is valid.
_PROBES = 20
_POLL_S = 2.0, 30.0


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
        self._cluster = sbatch.available() and not is_local(config.hydra.launcher)
        params = [f"{key}={value}" for key, value in settings["params"].items()]
        parsed = OverridesParser.create(loader).parse_overrides([*params, *arguments])
        # The command line comes last, so it replaces `params`.
        overrides = {override.get_key_element(): override for override in parsed}
        swept = {key: o for key, o in overrides.items() if o.is_sweep_override()}
        nodes = LaunchConfig(nodes=config.launch.nodes).node_numbers
        steps = None if "train.max_steps" in swept else config.train.max_steps
        self._settings = Settings.of(settings, config.metric, steps, nodes)
        if not swept:
            raise ConfigError(
                "hydra/sweeper=optuna has nothing to search: give one value or more as "
                "'optimizer.lr=tag(log,interval(1e-4,1e-1))', "
                "'model.hidden=choice([64],[256,256])' or 'seed=range(0,5)'"
            )
        check_keys(swept, rungs=self._settings.halves)
        self._texts = {key: reference(str(swept[key].input_line)) for key in sorted(swept)}
        self._space = distributions(swept)
        self._fixed = [str(o.input_line) for key, o in overrides.items() if key not in swept]
        if self._settings.metric != config.metric:
            self._fixed.append(f"metric={self._settings.metric}")
        self._name = self._settings.study_name or self._content_name(config)
        self._bases = Bases.of(Composer(loader, config), self._fixed, self._space)

    def run(self, folder: Path) -> None:
        """Begin the search in `folder`, or go on with the one that this command has begun.

        Without a cluster, or with `launch.wait=true`, it waits for the end, prints the best trial
        and writes `optimization_results.yaml`. What is wrong is an HpctrainError, and nothing was
        queued.
        """
        config = self._probe()
        for key in ("pack", "gpu_type"):
            if (value := getattr(config.launch, key)) not in (1, []):
                raise ConfigError(
                    f"launch.{key}={value} with hydra/sweeper=optuna: each worker of a search is a "
                    "job of its own, on one kind of GPU; leave it out"
                )
        folder = folder.absolute()
        if config.launch.dry_run:
            self._show(config, folder)
            return
        storage = self._settings.storage
        sweeps = Path(config.output_dir) / "sweeps"
        journal = sweeps / f"{self._name}.optuna"
        created = [each for each in (sweeps, sweeps.parent) if not each.exists()]
        sweeps.mkdir(parents=True, exist_ok=True)
        try:
            if why := why_no_locks(sweeps, alone=not self._cluster):
                raise ConfigError(
                    f"output_dir={config.output_dir}: a search needs locks that all nodes see, and "
                    f"{why}; take a folder of another file system"
                )
            self._check_folder(folder)
            study = studies.begin(self._settings, self._name, storage or str(journal), self._texts)
        except HpctrainError:
            for each in created:
                each.rmdir()
            raise
        folder = self._folder(study, folder)
        file = self._write(config, folder, study, storage or str(journal))
        budget.of_search(folder, config)
        if self._cluster:
            self._submit(config, folder, file, study)
        else:
            self._run_here(config, folder, file, study)

    def _probe(self) -> Config:
        """Return the config of a valid trial; raise an error if no trial has one.

        If only some trials are invalid, these are failed trials of the search.
        """
        for params in itertools.islice(self._proposals(), _PROBES):
            try:
                config, run = self._bases.run(params)
                break
            except HpctrainError as wrong:
                error = wrong
        else:
            raise error
        self._settings.check_widths(config)
        self._bases.check_alike()
        if not self._cluster:
            local_runs.check(config)
            if max(self._settings.widths) > 1:
                local_runs.check(replace(config, launch=replace(config.launch, nodes=2)))
        for _, problem in unmatched([Entry([], config, run)]):
            raise problem
        return config

    def _proposals(self) -> Iterator[dict[str, Any]]:
        import optuna

        sampler = studies.sampler(self._settings.sampler, 0)
        study = optuna.create_study(direction=self._settings.direction, sampler=sampler)
        while True:
            try:
                yield study.ask(self._space).params
            except ValueError as error:  # a grid of an interval
                target = self._settings.sampler["_target_"]
                raise ConfigError(f"hydra.sweeper.sampler._target_={target}: {error}") from error

    def _show(self, config: Config, folder: Path) -> None:
        """Show what `launch.dry_run` asks for: the first trials, and the script of the workers."""
        count = min(self._settings.n_jobs, self._settings.n_trials)
        for number, params in enumerate(itertools.islice(self._proposals(), count)):
            say(f"trial {number}: " + " ".join(f"{key}={value}" for key, value in params.items()))
        file = self._file(config, "", None)
        nowhere = folder / "workers" / "array-0"
        print(worker_arrays.script(file, config, nowhere, count), end="")

    def _check_folder(self, folder: Path) -> None:
        """Raise a ConfigError if the folder has another search, or a sweep."""
        file = SearchFile.of(folder)
        other = f"the search {file.study}" if file else "a sweep"
        if (file and file.study != self._name) or (not file and (folder / "sweep.json").exists()):
            raise ConfigError(
                f"hydra.sweep.dir={folder}: this folder has {other} already, and the search "
                f"{self._name} needs one of its own"
            )

    def _folder(self, study: Study, folder: Path) -> Path:
        """Return the folder in which the search was begun; a new one has the folder of Hydra."""
        known = study.user_attrs.get("folder")
        if known and (Path(known) / "search.json").exists():
            return Path(known)
        folder.mkdir(parents=True, exist_ok=True)
        study.set_user_attr("folder", str(folder))
        return folder

    def _write(self, config: Config, folder: Path, study: Study, storage: str) -> SearchFile:
        """Write what the workers need; a larger `n_trials` reaches those that live already."""
        code = snapshot.take(config.launch, config.output_dir, config.data.path)
        if code:
            code.write()
            say_copy(code)
        file = self._file(config, storage, code, since=len(study.get_trials(deepcopy=False)))
        self._bases.write(folder / "bases")
        if not (folder / "provenance").exists():
            provenance.store(folder / "provenance", provenance.collect())
        if not (folder / "sweep.json").exists():
            (folder / "sweep.json").write_text(written([]))
        file.write(folder)
        found = Found.read(file, study, folder)
        if found.trials:
            done = sum(trial.ended for trial in found.trials)
            print(
                f"study {self._name} continues: {done} trials done, "
                f"{len(found.trials) - done} under way"
            )
        if found.ended and (self._missing(found) or not all(t.ended for t in found.trials)):
            study.set_user_attr("ended", "")
        return file

    def _missing(self, found: Found) -> int:
        """Return how many trials are to be begun."""
        return max(0, self._settings.n_trials - sum(trial.asked for trial in found.trials))

    def _file(
        self, config: Config, storage: str, code: snapshot.Snapshot | None, since: int = 0
    ) -> SearchFile:
        from optuna.distributions import distribution_to_json

        asked = self._settings
        return SearchFile(
            study=self._name,
            storage=storage,
            metric=asked.metric,
            direction=asked.direction,
            n_trials=asked.n_trials,
            n_jobs=asked.n_jobs,
            max_failure_rate=asked.max_failure_rate,
            min_reports=asked.min_reports,
            since=since,
            sampler={str(key): value for key, value in asked.sampler.items()},
            space={key: distribution_to_json(each) for key, each in self._space.items()},
            overrides=tuple(self._fixed),
            choices=tuple(self._bases.choices),
            cwd=os.getcwd(),
            output_dir=config.output_dir,
            code=code.digest if code else None,
            pythonpath=tuple(map(str, code.pythonpath)) if code else (),
        )

    def _submit(self, config: Config, folder: Path, file: SearchFile, study: Study) -> None:
        for note in notes([Entry([], config, RunDir(folder))], True):
            say(note, style="yellow")
        if config.launch.check:
            nowhere = folder / "workers" / "array-0"
            text = worker_arrays.script(file, config, nowhere, 1)
            try:
                say(f"a worker: {sbatch.expected_start(text, config)}")
            except UnreachableError as error:
                say(f"not checked whether the jobs can start: {error}", style="yellow")
        found = Found.read(file, study, folder)
        if not found.ended:
            sent = worker_arrays.submit_missing(folder, file, found, config, first=True)
            workers = ", ".join(
                f"{count} with {width} node{'s' * (width > 1)}" for width, count in sent.items()
            )
            say(f"search {self._name}: workers submitted: {workers or 'none, enough live'}")
        if config.launch.wait and not found.ended:
            self._wait(config, folder, file, study)
        elif not found.ended:
            name = worker_arrays.short_name(folder)
            say(f"They run without this terminal: `python -m hpctrain status {name}`")
            return
        self._report(file, study, folder)

    def _wait(self, config: Config, folder: Path, file: SearchFile, study: Study) -> None:
        """Return when the search is over; submit workers of other widths when they are needed."""
        pause = _POLL_S[0]
        while not (found := Found.read(file, study, folder)).ended:
            try:
                worker_arrays.submit_missing(folder, file, found, config)
                if not worker_arrays.live(folder).total():
                    break
            except UnreachableError as error:
                say(f"{error}; trying again", style="yellow")
            time.sleep(pause)
            pause = min(_POLL_S[1], pause * 1.2)
        if not Found.read(file, study, folder).ended:
            raise LaunchError(
                f"the workers of {folder.name} have ended, but not the search (their logs: "
                f"{folder}/workers/*/logs); the same command goes on"
            )

    def _run_here(self, config: Config, folder: Path, file: SearchFile, study: Study) -> None:
        """Let one worker run on this machine."""
        found = Found.read(file, study, folder)
        if not found.ended:
            worker = worker_arrays.new_worker(folder, worker_arrays.WorkerFile(found.widths[0]))
            say(f"search {self._name}: a worker here; its log: {worker}/logs")
            command = [sys.executable, "-u", "-m", "hpctrain", "work", str(worker)]
            path = Path(config.output_dir) / "code" / file.code if file.code else None
            code = snapshot.Snapshot.load(path) if path else None
            _, process = local_runs.start(config.launch, worker / "logs", code, command)
            try:
                process.wait()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
            if not Found.read(file, study, folder).ended:
                raise LaunchError(f"the worker has ended, but not the search: see {worker}/logs")
        self._report(file, study, folder)

    def _content_name(self, config: DictConfig) -> str:
        """Return a name that depends on the search, so that the same command finds its study."""
        kept = [str(key) for key in config if key not in _NOT_IN_NAME]
        plain = OmegaConf.to_container(OmegaConf.masked_copy(config, kept))
        space = sorted(self._texts.values())
        parts: list[Any] = [plain, space, self._settings.direction]
        if self._settings.halves:
            parts.append(self._settings.rungs)
        if self._settings.metric != config.metric:
            parts.append(self._settings.metric)
        text = reference(json.dumps(parts, sort_keys=True, default=str))
        return f"{config.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def _report(self, file: SearchFile, study: Study, folder: Path) -> None:
        found = Found.read(file, study, folder)
        for trial in found.at("failed"):
            print(mask(f"trial {trial.number} failed: {trial.reason}"), file=sys.stderr)
        best, finished = found.best, found.at("finished")
        if found.ended and found.ended != NOTHING_LEFT:
            raise LaunchError(found.ended)
        if best is None:
            raise LaunchError(f"none of the {len(found.trials)} trials finished; see above")
        value = study.get_trials(deepcopy=False)[best.number].value
        result = {"name": "optuna", "best_params": dict(best.params), "best_value": value}
        (folder / "optimization_results.yaml").write_text(
            yaml.safe_dump(referenced(result), sort_keys=False)
        )
        print(f"{len(finished)} of {len(found.trials)} trials of study {self._name} finished")
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        print(f"best: {found.metric}={value} (trial {best.number}): {values}")
