"""How long runs train that are like no measured one, as `plan` foresees it."""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from hpctrain.config.frozen import dump
from hpctrain.config.schema import Config
from hpctrain.estimates.like_runs import kind

log = logging.getLogger(__name__)
_MOST = 8  # unlike runs that are looked at: each takes seconds
_LIMIT_S = 300.0  # other submissions wait meanwhile


def planned_hours(configs: Collection[Config]) -> list[float | None]:
    """Return the hours of the steps of each run; None where its GPUs or its end are not known.

    To foresee it needs torch, which is not imported here: another process does.
    """
    keys = [_deciding(config) for config in configs]
    unlike = {key: config for key, config in zip(keys, configs, strict=True) if key}
    if not unlike:
        return [None] * len(keys)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpctrain.plan.by_kind", "--hours"]
        for number, config in enumerate([*unlike.values()][:_MOST]):
            command.append(f"{folder}/{number}.yaml")
            Path(command[-1]).write_text(dump(config))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=_LIMIT_S
            )
        except subprocess.SubprocessError as error:
            why = getattr(error, "stderr", None) or error
            log.warning("launch.budget_gpu_hours: plan has failed: %s", str(why)[-2000:])
            return [None] * len(keys)
    hours = dict(zip(unlike, json.loads(done.stdout), strict=False))
    return [hours.get(key) for key in keys]


def _deciding(config: Config) -> str:
    """Return what decides how long a run takes; "" without whole GPUs of a known kind."""
    launch, train = config.launch, config.train
    known = (config.hardware or launch.gpu_type) and config.parallel.device != "cpu"
    if not known or not launch.gpus_per_node or launch.gpus_per_run is not None:
        return ""
    length = train.max_steps, train.max_epochs, train.global_batch_size, train.batch_size_ramp
    size = launch.nodes, launch.tasks_per_node, launch.gpu_type
    micro = train.accumulate, train.micro_batch_size
    return repr((kind(config), length, size, micro, config.data, config.parallel))
