"""`launch.budget_gpu_hours`: what the jobs of one command may take, by their time limits."""

from collections.abc import Collection

from hpctrain.cluster.slurm.partition_limit import road
from hpctrain.config.schema import Config, LaunchConfig, SiteConfig
from hpctrain.errors import ConfigError


def check_budget(jobs: Collection[tuple[Config, int]]) -> None:
    """Raise a ConfigError if so many jobs of these valid configs may take more than the budget."""
    budgets = [config.launch.budget_gpu_hours for config, _ in jobs]
    budget = min((each for each in budgets if each is not None), default=None)
    if budget is None:
        return
    hours = sum(count * _most_hours(config.launch, config.site) for config, count in jobs)
    if hours <= budget:
        return
    gpus = any(config.launch.gpus_per_node for config, _ in jobs)
    raise ConfigError(
        f"launch.budget_gpu_hours={budget:g}: by their time limits the jobs may take {hours:.4g} "
        f"{'GPU-hours' if gpus else 'rank-hours (no GPUs)'}, so nothing was queued; give fewer "
        "runs, a shorter launch.time_min, or a larger budget"
    )


def _most_hours(launch: LaunchConfig, site: SiteConfig) -> float:
    """Return what a run takes if each job of its chain lasts as long as it may."""
    per_node = launch.gpus_per_run or launch.gpus_per_node or launch.tasks_per_node
    nodes = launch.node_numbers[-1] + launch.spares
    return launch.limit_min / 60 * nodes * per_node * road(site, launch.chain).jobs
