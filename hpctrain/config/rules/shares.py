"""The equal shares into which the samples of a step are divided: `parallel.weights`.

    weights [2, 1], 2 nodes x 2 ranks, 6 shares ── rank 0: 0 1, rank 1: 2 3, rank 2: 4, rank 3: 5

A rank makes as many micro-batches as it has shares, times those of `train.accumulate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, ParallelConfig


def shares(parallel: ParallelConfig, dp: int) -> int:
    """Return the number of shares of `dp` ranks; one of a node with weight W takes W of them."""
    weights = parallel.weights
    return dp if weights is None else sum(weights) * (dp // len(weights))


def problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit `parallel.weights`."""
    parallel, train, launch = config.parallel, config.train, config.launch
    weights, ranks = parallel.weights, degrees.ranks
    if weights is None:
        return
    key = f"parallel.weights={weights}"
    known = ranks in config.asked_world_sizes  # torchrun and sbatch start other numbers of ranks
    nodes = ranks // launch.tasks_per_node if known else len(weights)
    if nodes != len(weights):
        yield f"{key}: {len(weights)} numbers, but the job has {nodes} nodes; give one for each"
    elif ranks % nodes:
        yield f"{key}: {nodes} nodes cannot have the same number of {ranks} ranks"
    # The ranks make different numbers of micro-batches, so none may communicate in each of them.
    if ranks != degrees.dp:
        yield f"{key} with {degrees}: use only dp_replicate and dp_shard"
    if (degrees.dp_shard > 1 and parallel.zero != 1) or parallel.sync == "every":
        yield (
            f"{key} with dp_shard {degrees.dp_shard}, parallel.zero={parallel.zero} and "
            f"parallel.sync={parallel.sync}: the ranks would communicate in every micro-batch, and "
            "those with fewer would not answer; use parallel.dp_shard=1, or parallel.zero=1 and "
            "parallel.sync=auto"
        )
    refused = {
        f"parallel.ep={parallel.ep}": parallel.ep > 1,
        "parallel.fsdp.offload=true": parallel.fsdp.offload,
        "parallel.fsdp.agree=true": parallel.fsdp.agree,
        f"train.local_sgd.every={train.local_sgd.every}": train.local_sgd.every is not None,
        f"train.compression.kind={train.compression.kind}": train.compression.kind != "none",
        "train.micro_batch_size=auto": train.micro_batch_size == "auto",
        "parallel.ddp.static_graph=true": parallel.ddp.static_graph,
        "data.collate=pack": config.data.collate == "pack",
    }
    for other in (other for other, given in refused.items() if given):
        yield f"{key} with {other}: give one of them"
