"""How long runs train that are like no measured one, as `plan` foresees it."""

import itertools
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hpctrain.config.frozen import dump
from hpctrain.config.schema import Config
from hpctrain.estimates.like_runs import kind

log = logging.getLogger(__name__)
_MOST = 8  # unlike runs that are looked at: each takes seconds


def planned_hours(configs: Iterable[Config]) -> list[float | None]:
    """Return the hours of the steps of each run; None where its GPU or its end is not known.

    To foresee it needs torch, which is not imported here: another process does.
    """
    asked = [*configs]
    keys = [_deciding(config) if _is_known(config) else "" for config in asked]
    unlike = dict(zip(keys, asked, strict=True))
    unlike.pop("", None)
    unlike = dict(itertools.islice(unlike.items(), _MOST))
    if not unlike:
        return [None] * len(asked)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpctrain.plan.by_kind", "--hours"]
        for number, config in enumerate(unlike.values()):
            command.append(f"{folder}/{number}.yaml")
            Path(command[-1]).write_text(dump(config))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        log.warning("launch.budget_gpu_hours: plan has failed: %s", done.stderr[-2000:])
        return [None] * len(asked)
    hours = dict(zip(unlike, json.loads(done.stdout), strict=True))
    return [hours.get(key) for key in keys]


def _deciding(config: Config) -> str:
    """Return what decides how long a run takes, unlike its seed or learning rate."""
    train, launch = config.train, config.launch
    length = train.max_steps, train.max_epochs, train.global_batch_size, train.batch_size_ramp
    size = launch.nodes, launch.tasks_per_node, launch.gpu_type
    return repr((kind(config), length, size, train.micro_batch_size, config.data.path))


def _is_known(config: Config) -> bool:
    """Return whether the GPUs of a run are known, of which it has whole ones."""
    launch = config.launch
    whole = launch.gpus_per_node > 0 and launch.gpus_per_run is None
    return whole and bool(config.hardware or launch.gpu_type) and config.parallel.device != "cpu"
