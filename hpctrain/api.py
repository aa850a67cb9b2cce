"""hpctrain from Python: the same checks and run directories as on the command line.

import hpctrain

jobs = hpctrain.submit("experiment=digits", "optimizer.lr=1e-3,3e-3")   jobs of submitit
hpctrain.train("experiment=digits")                                     here, in this process
hpctrain.load_run("runs/digits-3fa92c1b").model()                       config, metrics, weights
hpctrain.session("name=gan")                                             a loop of one's own
hpctrain.submit_function(f, 1, 2, nodes=2)                              any importable function
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import private_files

if TYPE_CHECKING:
    from hpctrain.config.schema import Config
    from hpctrain.engine.session import Session
    from hpctrain.launch.functions.function import FunctionJob, LocalFunctionJob
    from hpctrain.launch.jobs import LocalRunJob, RunJob
    from hpctrain.results.loaded import LoadedRun

Folder = str | os.PathLike[str]


def submit(*overrides: str, config_dir: Folder | None = None) -> list[RunJob | LocalRunJob]:
    """Submit runs as `python -m hpctrain -m OVERRIDES` does.

    On Slurm it returns as soon as the jobs are queued. Without a cluster, and with
    `hydra/launcher=submitit_local`, the runs run on this machine, one after the other, and it
    returns when the last one has ended.

    Args:
        *overrides: As on the command line. Several values with commas give several runs.
        config_dir: A folder with more configs, as `--config-dir`.

    Returns:
        One job of submitit for each run, also for runs that were finished or under way before.
        `result()` waits for the run and returns its metric. With `launch.dry_run=true` there are
        none.

    Raises:
        ConfigError: An override is wrong; nothing was queued.
        DataError: A data set is missing or damaged; nothing was queued.
        LaunchError: The scheduler refuses a job.
    """
    from hpctrain.config.composing.compose_sweep import composed
    from hpctrain.launch.sweeps.sweep import Sweep

    with private_files(), composed(overrides, config_dir) as call:
        sweep = Sweep.of(call.folder, call.composer, call.runs, local=call.local)
        dry_run = any(entry.config.launch.dry_run for entry in sweep.entries)
        sweep.folder.mkdir(parents=True, exist_ok=True)
        sweep.submit()
    return [] if dry_run else sweep.jobs()


def train(*overrides: str, config_dir: Folder | None = None) -> float | None:
    """Train one run here as `python -m hpctrain OVERRIDES` does, with the ranks that were started.

    Call it in the main thread: Ctrl-C then saves a checkpoint, and the same call goes on from it.

    Args:
        *overrides: As on the command line.
        config_dir: A folder with more configs, as `--config-dir`.

    Returns:
        The last value of the config key `metric`; None if the run has not measured it.

    Raises:
        ConfigError: An override is wrong, they give several runs, or this is another thread.
        KeyboardInterrupt: The run was stopped by Ctrl-C and has saved.
        LaunchError: The run was stopped by another signal or a stop request, and has saved.
    """
    from hpctrain.engine.job.here import train_here
    from hpctrain.launch.jobs import outcome

    began = time.monotonic()
    config = _of_one_run("train", "train runs one, submit several", overrides, config_dir)
    with private_files():
        run, code = train_here(config, [], began)
    if code == 130:
        raise KeyboardInterrupt(f"{run.name} has saved; the same call goes on from there")
    return outcome(run, config.metric)


@contextmanager
def session(*overrides: str, config_dir: Folder | None = None) -> Iterator[Session]:
    """Open a session for a loop in this program; the `with` block is the loop of the run.

    It is the same under `python`, `torchrun` and `srun`, and in a job of `submit_function`: the
    program goes on from the last checkpoint when it is started again with the same overrides.

    Args:
        *overrides: As on the command line, such as "name=gan", "data.path=…".
        config_dir: A folder with more configs, as `--config-dir`.

    Raises:
        ConfigError: An override is wrong, they give several runs, or this is another thread.
        SystemExit: The run was stopped and has saved, or it has finished before.
    """
    from hpctrain.config.rules.own_loop import SCRIPT
    from hpctrain.engine.job.here import session_here

    began = time.monotonic()
    config = _of_one_run(
        "session", "a session has one", overrides, config_dir, f"loop._target_={SCRIPT}"
    )
    with private_files(), session_here(config, began) as made:
        yield made


def _of_one_run(
    caller: str, words: str, overrides: Sequence[str], config_dir: Folder | None, *before: str
) -> Config:
    """Return the config of the run that the overrides of a call describe, in the main thread."""
    from hpctrain.config.composing.compose_sweep import composed

    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"hpctrain.{caller} must be called in the main thread, which gets signals"
        )
    with composed([*before, *overrides], config_dir) as call:
        if len(call.runs) != 1:
            raise ConfigError(f"{' '.join(overrides)}: {len(call.runs)} runs; {words}")
        return call.composer.typed(call.runs[0])


def load_run(path: Folder) -> LoadedRun:
    """Open a run directory to look at it.

    Args:
        path: The run directory.

    Returns:
        An object with `config`, `metrics` (a DataFrame), `result`, `state`, `model()` and
        `inputs(sample)`.

    Raises:
        StorageError: It is no run directory, or it is damaged.
    """
    from pathlib import Path

    from hpctrain.results.loaded import LoadedRun

    return LoadedRun(Path(path))


def submit_function(
    function: Callable[..., Any],
    *args: Any,
    nodes: int = 1,
    tasks_per_node: int = 1,
    overrides: Sequence[str] = (),
    config_dir: Folder | None = None,
    **kwargs: Any,
) -> FunctionJob | LocalFunctionJob:
    """Run a function as the ranks of a job, from a copy of the code.

    Each rank calls the function with the same arguments. It can call
    `torch.distributed.init_process_group`: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like
    are set. A job that is preempted starts again from the beginning.

    Args:
        function: A function that `import` finds: at the top of a module, not in a notebook or in
            the program itself.
        *args: Arguments of the function: None, bool, int, float, str, and lists and dicts of these,
            as JSON has them: it gets a tuple as a list, a path or a key of a dict as a text, and
            values of NumPy and torch as numbers and lists. The same holds for the result.
        nodes: The number of nodes.
        tasks_per_node: The number of ranks on each node.
        overrides: More keys, of `launch`, `site`, `name` and `output_dir`, as on the command line.
        config_dir: A folder with more configs, as `--config-dir`.
        **kwargs: Keyword arguments of the function.

    Returns:
        A job of submitit. `result()` waits and returns the result of rank 0; `results()` returns
        those of all ranks.

    Raises:
        ConfigError: The function cannot be imported, an argument has another type, or an override
            is wrong; nothing was queued.
        LaunchError: The scheduler refuses the job.
    """
    from hpctrain.launch.functions import function as functions
    from hpctrain.launch.functions.function_call import Call

    shape = [f"launch.nodes={nodes}", f"launch.tasks_per_node={tasks_per_node}"]
    with private_files():
        config, here = functions.compose([*shape, *overrides], config_dir)
        (job,) = functions.submit(config, [Call.of(function, args, kwargs)], here)
        return job
