"""The batch of a weak scaling series: that of one node, times the nodes.

    +scaling=weak train.global_batch_size=64 launch.nodes=1,2,4 ── 64, 128 and 256 samples

This happens once, when a command line is composed. A frozen config has the batch that it trains.
"""

from __future__ import annotations

from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError


def scaled(config: Config) -> Config:
    """Return the config, in which a weak scaling series has the batch of its nodes.

    Such a series with a range of nodes is a ConfigError.
    """
    if config.scaling is None:
        return config
    nodes = config.launch.node_numbers
    if len(nodes) > 1:
        raise ConfigError(
            f"launch.nodes={config.launch.nodes}: with scaling={config.scaling} each run needs a "
            "fixed number of nodes, as in launch.nodes=1,2,4"
        )
    if config.scaling == "weak":
        config.train.global_batch_size *= nodes.start
        config.train.batch_size_ramp = [
            {name: n if name == "steps" else n * nodes.start for name, n in stage.items()}
            for stage in config.train.batch_size_ramp
        ]
    return config
