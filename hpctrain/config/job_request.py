"""What the jobs of a run ask the cluster for: the part of a config that a batch script is made of.

Config ── JobRequest.of() ── cluster.slurm: script, sbatch, excluded hosts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.rank_counts import fitting_nodes
from hpctrain.config.schema import Config, LaunchConfig, SiteConfig


@dataclass(frozen=True)
class JobRequest:
    """The resources of a job, its name, and the folders that its ranks use."""

    name: str
    output_dir: str
    launch: LaunchConfig
    site: SiteConfig
    nodes: list[int]  # the numbers of nodes with which the run can train, increasing
    data: list[str]  # the paths of the data sets
    mixed: bool  # its nodes may differ

    @classmethod
    def of(cls, config: Config) -> JobRequest:
        """Return what a valid config asks for."""
        return cls(
            name=config.name,
            output_dir=config.output_dir,
            launch=config.launch,
            site=config.site,
            nodes=fitting_nodes(config),
            data=config.data.paths,
            mixed=_may_differ(config.site, config.parallel.weights),
        )

    @property
    def alike(self) -> bool:
        """Whether all of its nodes must be alike, and there are several."""
        return self.launch.nodes != 1 and not self.mixed


def _may_differ(site: SiteConfig, weights: Sequence[int] | None) -> bool:
    """Return whether the nodes of a job may differ.

    It has `parallel.weights`, or a choice of partitions, types of GPUs or features.
    """
    chosen = f"{site.partition} {site.gpu_type} {site.constraint}"
    return weights is not None or "," in chosen or "|" in chosen
