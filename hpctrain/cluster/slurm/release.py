"""Which Slurm this is, and what only newer ones can: options that a user may give in `site`.

The commands tell their own release; no controller is asked for it.
"""

import functools
import re
from typing import Any

from hpctrain.base.errors import ConfigError
from hpctrain.cluster.slurm.partition_limit import cluster_config, value_of
from hpctrain.cluster.slurm.queue import ask

_SINCE = {"mem-update": (26, 5), "requeue": (25, 11), "stepmgr": (24, 5)}


@functools.cache
def words() -> str:
    """Return what the commands say of themselves, such as `slurm-wlm 22.05.8`; "" if nothing."""
    found = re.search(r"^slurm\S* \d\S*$", ask("scontrol", "--version", quiet=True) or "", re.M)
    return found[0] if found else ""


def is_before(release: tuple[int, int]) -> bool:
    """Return whether this is an older Slurm than that; one that says nothing is not."""
    found = re.search(r" (\d+)\.(\d+)", words())
    return found is not None and (int(found[1]), int(found[2])) < release


def check_option(key: str, option: str, value: Any) -> None:
    """Raise a ConfigError if this Slurm or this cluster does not know an option of sbatch."""
    if option == "requeue" and value != "expedite":
        raise ConfigError(f"{key}={value}: expedite, or nothing: the script sets --requeue itself")
    if is_before(needed := _SINCE.get(option, (0, 0))):
        raise ConfigError(
            f"{key}={value}: it needs Slurm {needed[0]}.{needed[1]:02} or newer, and this is "
            f"{words()}; leave it out"
        )
    settings = cluster_config() if option == "requeue" else None
    if settings and "enable_expedited_requeue" not in value_of(settings, "SlurmctldParameters"):
        raise ConfigError(
            f"{key}={value}: this cluster does not allow it (SlurmctldParameters of `scontrol show "
            "config` lacks enable_expedited_requeue); leave it out"
        )
