"""What a run says of itself on its page in MLflow: tags and data sets.

To the tags belong the versions of libraries and drivers on the host of rank 0. The monitor
of each node records the GPUs, the driver and the kernel of its own node.
"""

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.base.processes import gpu_driver
from hpctrain.base.version import __version__
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import DataConfig
from hpctrain.data.places.placement import load_index
from hpctrain.data.shards.index import Index
from hpctrain.runs.code import provenance
from hpctrain.runs.run_dir import RunDir

_IMAGES = "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "ENROOT_IMAGE"


def tags(run: RunDir, ranks: RankInfo, facts: Mapping[str, str]) -> dict[str, str]:
    """Return the tags; the facts are what `environment` has found."""
    record, (source, commit) = run.read(), provenance.origin(run.provenance)
    job_ids = dict.fromkeys(attempt.job_id for attempt in record.attempts)
    return {
        # MLflow shows the commit only beside a source.
        "mlflow.source.name": source or "hpctrain",
        "mlflow.source.type": "JOB" if ranks.job_id else "LOCAL",
        "mlflow.source.git.commit": commit,
        "hpctrain.version": __version__,
        "hpctrain.run": str(run.path),
        "hpctrain.launcher": ranks.launcher,
        "hpctrain.job_id": " ".join(filter(None, job_ids)),
        "hpctrain.hosts": ",".join(ranks.hosts),
        "hpctrain.world_size": str(ranks.world_size),
        "hpctrain.command": " ".join(sys.argv),
        **{f"hpctrain.parent_{key}": str(v) for key, v in (record.parent or {}).items()},
        **{f"hpctrain.env.{name}": value for name, value in facts.items()},
    }


def data_sets(data: DataConfig) -> list[dict[str, Any]]:
    """Return the facts of each data set, as `Tracker.log_dataset` takes them."""
    parts = data.mixture or [{}]
    used = {str(part.get("path", data.path)): "training" for part in parts}
    evaluated = [data.path] if data.evaluated is not None else []
    for path in (*evaluated, *(path for path, _ in data.other_sets.values())):
        used.setdefault(path, "evaluation")
    return [_facts(load_index(path), path, context) for path, context in used.items()]


def _facts(index: Index, path: str, context: str) -> dict[str, Any]:
    return {
        "name": path.rstrip("/").rpartition("/")[2] or path,
        "digest": index.digest,
        "source": path,
        "context": context,
        "samples": {name: index.split(name).count for name in index.splits},
        "fields": {
            name: {"dtype": field.dtype, "shape": list(field.shape)}
            for name, field in index.fields.items()
        },
    }


def environment(image: str | None = None) -> dict[str, str]:
    """Return what this host trains with, by name; what is not there has no name.

    It is recorded with each attempt. The image is that of the config; None looks whether this
    process is in a container.
    """
    found = {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "",
        "kernel": platform.release(),
        "driver": gpu_driver.nvidia() or gpu_driver.amd() or "",
        "image": image or next(filter(None, map(os.environ.get, _IMAGES)), ""),
    }
    return {name: value for name, value in found.items() if value}
