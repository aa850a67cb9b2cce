"""The command of a search: check it, begin or find its study, and start its workers.

    -m hydra/sweeper=optuna … ── settings, space, a valid trial ── study, search.json, bases
                                                             workers: an array, or one here ──┘

The workers need nobody: after the submission the command returns. The same command again finds the
study, and adds workers as far as fewer than `n_jobs` live.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, HpctrainError, LaunchError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.lock import why_no_locks
from hpctrain.base.files.record import written
from hpctrain.base.secrets import mask, reference
from hpctrain.base.terminal.console import AS_JSON, say
from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.patience import watching
from hpctrain.cluster.slurm.queue import UnreachableError
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.job_request import JobRequest
from hpctrain.config.launcher_keys import is_local
from hpctrain.config.schema import Config, LaunchConfig
from hpctrain.launch.entry import Entry
from hpctrain.launch.executors import LocalExecutor
from hpctrain.launch.sweeps.before_queueing import check_bounds, check_here, notes, say_copy
from hpctrain.runs.code import provenance, snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.search import worker_arrays
from hpctrain.search.settings import SearchSettings
from hpctrain.search.space import check_keys, distribution, sampler
from hpctrain.search.trial_config import Bases
from hpctrain.search.trials import FoundSearch, SearchFile

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
        steps = None if "train.max_steps" in swept else config.train.max_steps
        self._settings = SearchSettings.checked(settings, config.metric, steps)
        if not swept:
            raise ConfigError(
                "hydra/sweeper=optuna has nothing to search: give one value or more as "
                "'optimizer.lr=tag(log,interval(1e-4,1e-1))', "
                "'model.hidden=choice([64],[256,256])' or 'seed=range(0,5)'"
            )
        check_keys(swept, rungs=len(self._settings.rungs) > 1)
        texts = {key: reference(str(swept[key].input_line)) for key in sorted(swept)}
        self._settings = msgspec.structs.replace(self._settings, sweeps=texts)
        self._space = {key: distribution(each) for key, each in swept.items()}
        self._fixed = [str(o.input_line) for key, o in overrides.items() if key not in swept]
        self._name = settings["study_name"] or self._content_name(config)
        composer = Composer(loader, config)
        self._config_dir = composer.config_dir
        self._bases = Bases.of(composer, self._fixed, self._space)

    def run(self, folder: Path) -> None:
        """Begin the search in `folder`, or go on with the one that this command has begun.

        Without a cluster, or with `launch.wait=true`, it waits for the end, and prints the best
        trial. What is wrong is an HpctrainError, and nothing was
        queued.
        """
        config = self._probe()
        folder = folder.absolute()
        count = min(self._settings.n_jobs, self._settings.n_trials)
        if AS_JSON.get():
            raise ConfigError("--json: of a search `status SEARCH --json` tells the standing")
        check_bounds([(config, count if self._cluster else 1)])
        if config.launch.dry_run:
            job = JobRequest.of(config)
            array = worker_arrays.executor(job, folder / "workers" / "array-0", count)
            print(array.text(), end="")
            return
        sweeps = Path(config.output_dir) / "sweeps"
        there = next(each for each in (sweeps, *sweeps.parents) if each.exists())
        if why := why_no_locks(there, alone=not self._cluster):
            raise ConfigError(
                f"output_dir={config.output_dir}: a search needs locks that all nodes see, and "
                f"{why}; take a folder of another file system"
            )
        storage = sweeps / f"{self._name}.optuna"
        study, folder = self._study(storage, folder)
        code = snapshot.take(config.launch, config.output_dir, config.data.path)
        if code:
            code.write()
            say_copy(code)
        found = self._write(study, storage, folder, config.output_dir, code)
        if not found.ended and not self._cluster:
            self._run_here(config.launch, folder, code)
        elif not found.ended:
            said = notes([Entry([], config, RunDir(folder))], True)
            if not self._submit(JobRequest.of(config), said, folder):
                return
        self._report(FoundSearch.of(folder))

    def _probe(self) -> Config:
        """Return the config of a valid trial; raise an error if no trial has one.

        If only some trials are invalid, these are failed trials of the search.
        """
        import optuna

        proposing = sampler(self._settings.sampler)
        study = optuna.create_study(direction=self._settings.direction, sampler=proposing)
        for left in reversed(range(_PROBES)):
            try:
                params = study.ask(self._space).params
            except ValueError as error:  # a grid of an interval
                target = self._settings.sampler["_target_"]
                raise ConfigError(f"hydra.sweeper.sampler._target_={target}: {error}") from error
            try:
                config, run = self._bases.run(params)
                break
            except HpctrainError:
                if not left:
                    raise
        self._settings.check_trial(config.data, config.train)
        if not self._cluster:
            check_here(JobRequest.of(config))
        for _, problem in offered.foreign_targets.refused([Entry([], config, run)]):
            raise problem
        if config.launch.pack != 1:
            raise ConfigError(
                f"launch.pack={config.launch.pack} with hydra/sweeper=optuna: each worker of a "
                "search is a job of its own; leave it out"
            )
        return config

    def _study(self, storage: Path, folder: Path) -> tuple[Study, Path]:
        """Return the study, made if it is not there, and the folder in which its search was begun.

        A study that searches something else, or a folder that has another search, is a ConfigError.
        """
        import optuna

        from hpctrain.search.study_file import study_storage  # it imports Optuna

        known = SearchFile.of(folder)
        other = f"the search {known.study}" if known else "a sweep"
        if known.study != self._name if known else (folder / "sweep.json").exists():
            raise ConfigError(
                f"hydra.sweep.dir={folder}: this folder has {other} already, and the search "
                f"{self._name} needs one of its own"
            )
        study = optuna.create_study(
            study_name=self._name,
            storage=study_storage(storage),
            direction=self._settings.direction,
            load_if_exists=True,
        )
        if "folder" not in study.user_attrs and study.get_trials(deepcopy=False):
            raise ConfigError(
                f"hydra.sweeper.study_name={self._name}: {storage} has a study of this name with "
                "trials that an older version, or another program, has begun. Take another "
                "hydra.sweeper.study_name"
            )
        begun = Path(study.user_attrs.get("folder", folder))
        if (before := SearchFile.of(begun)) is None:
            study.set_user_attr("folder", str(folder))
            return study, folder
        old, new = before.fixed, self._settings.fixed
        changed = "; ".join(
            f"{old.get(key, f'no {key}')} (now {new.get(key, 'left out')})"
            for key in old | new
            if old.get(key) != new.get(key)
        )
        if changed:
            raise ConfigError(
                f"hydra.sweeper.study_name={self._name}: this study has {mask(changed)}: trials of "
                "both could not be compared. Take another hydra.sweeper.study_name, or null for "
                "one of its own"
            )
        return study, begun

    def _write(
        self,
        study: Study,
        storage: Path,
        folder: Path,
        output_dir: str,
        code: snapshot.Snapshot | None,
    ) -> FoundSearch:
        """Write what the workers need; a larger `n_trials` reaches those that live already."""
        from optuna.distributions import distribution_to_json

        before = SearchFile.of(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "bases.json", written(self._bases))
        SearchFile(
            **msgspec.structs.asdict(self._settings),
            study=self._name,
            storage=str(storage),
            uid=before.uid if before else uuid.uuid4().hex,
            space={key: distribution_to_json(each) for key, each in self._space.items()},
            overrides=tuple(self._fixed),
            config_dir=self._config_dir,
            output_dir=output_dir,
            code=code.digest if code else None,
            pythonpath=tuple(map(str, code.pythonpath)) if code else (),
        ).write(folder)
        if not (folder / "sweep.json").exists():
            provenance.store(folder / "provenance", provenance.collect())
            write_atomically(folder / "sweep.json", written([]))
        found = FoundSearch.of(folder, study)
        if count := len(found.trials):
            done = sum(trial.ended for trial in found.trials)
            print(f"study {self._name} continues: {done} trials done, {count - done} under way")
        if found.ended and (found.new or not all(trial.ended for trial in found.trials)):
            study.set_user_attr("ended", "")
            found = msgspec.structs.replace(found, ended="")
        return found

    def _submit(self, job: JobRequest, said: Iterable[str], folder: Path) -> bool:
        """Submit the workers; return whether the search is over, for which `launch.wait` waits.

        What is `said` before, is printed.
        """
        for note in said:
            say(note, style="yellow")
        sent = worker_arrays.submit_missing(folder, FoundSearch.of(folder), job, first=True)
        say(f"search {self._name}: workers submitted: {sent or 'none, enough live'}")
        if not job.launch.wait:
            name = shlex.quote(str(folder))
            say(f"They run without this terminal: `python -m hpctrain status {name}`")
            return False
        with watching():
            self._wait(folder)
        return True

    def _wait(self, folder: Path) -> None:
        """Wait for the end of the search; that of all workers before it is a LaunchError."""
        pause = _POLL_S[0]
        while not FoundSearch.of(folder).ended:
            try:
                if not worker_arrays.live(folder) and not FoundSearch.of(folder).ended:
                    raise LaunchError(
                        f"the workers of {folder.name} have ended, but not the search (their logs: "
                        f"{folder}/workers/*/logs); the same command goes on"
                    )
            except UnreachableError as error:
                say(f"{error}; trying again", style="yellow")
            time.sleep(pause)
            pause = min(_POLL_S[1], pause * 1.2)

    def _run_here(self, launch: LaunchConfig, folder: Path, code: snapshot.Snapshot | None) -> None:
        """Let one worker run on this machine."""
        worker = worker_arrays.new_worker(folder, worker_arrays.WorkerFile())
        say(f"search {self._name}: a worker here; its log: {worker}/logs")
        process = LocalExecutor(worker, launch, code, "work").start()
        try:
            process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        if not FoundSearch.of(folder).ended:
            raise LaunchError(f"the worker has ended, but not the search: see {worker}/logs")

    def _content_name(self, config: DictConfig) -> str:
        """Return a name that depends on the search, so that the same command finds its study."""
        kept = [str(key) for key in config if key not in _NOT_IN_NAME]
        plain = OmegaConf.to_container(OmegaConf.masked_copy(config, kept))
        space = sorted(self._settings.sweeps.values())
        parts: list[Any] = [plain, space, self._settings.direction]
        if len(self._settings.rungs) > 1:
            parts.append(self._settings.rungs)
        text = reference(json.dumps(parts, sort_keys=True, default=str))
        return f"{config.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def _report(self, found: FoundSearch) -> None:
        """Print the best trial."""
        for trial in found.at("failed"):
            print(mask(f"trial {trial.number} failed: {trial.reason}"), file=sys.stderr)
        if (best := found.best) is None:
            raise LaunchError(f"none of the {len(found.trials)} trials finished; see above")
        done = f"{len(found.at('finished'))} of {len(found.trials)}"
        print(f"{done} trials of study {self._name} finished")
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        print(f"best: {found.metric}={best.value} (trial {best.number}): {values}")
