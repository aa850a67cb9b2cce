"""What a site file says that the cluster of today does not have."""

import re
from collections.abc import Iterable, Iterator

from hpctrain.cluster.slurm.sbatch_options import sbatch_options
from hpctrain.config.schema import LaunchConfig, SiteConfig
from hpctrain.insight.site.choices import SiteFacts
from hpctrain.insight.site.surroundings import available_modules
from hpctrain.insight.site.trials import refusal


def found(site: SiteConfig, seen: SiteFacts) -> Iterator[str]:
    """Yield a sentence for each line that does not fit; the last one is sbatch's own word."""
    names = site.partition.split(",") if site.partition else []
    mine = [kind for kind in seen.kinds if not names or kind.partition in names]
    yours = [each for each in seen.associations or () if site.account in (None, each.account)]
    words = re.findall(r"[^\s&|,()\[\]*\"]+", site.constraint or "")
    there: dict[str, tuple[list[str], Iterable[str]]] = {
        "partition": (names, (kind.partition for kind in seen.kinds if kind.is_open)),
        "account": ([site.account or ""], (each.account for each in seen.associations or ())),
        "qos": ([site.qos or ""], (name for each in yours for name in each.qos)),
        "constraint": (
            [each for each in words if not each.isdecimal()],
            (each for kind in mine for each in kind.features),
        ),
        "gpu_type": ([site.gpu_type or ""], (each for kind in mine for each in kind.gpus)),
    }
    for key, (asked, known) in there.items():
        if seen.associations is None and key in ("account", "qos"):
            continue
        options = [*dict.fromkeys(filter(None, known))]
        for each in filter(None, asked):
            if each not in options:
                yield f"site.{key}: there is no {each} for you, but {', '.join(options) or 'none'}"
    yield from _of_host(site)
    if said := refusal(_options(site, has_gpus=any(kind.gpus for kind in mine))):
        yield f"sbatch --test-only refuses a job of this site: {said}"


def _of_host(site: SiteConfig) -> Iterator[str]:
    # Interfaces are those of the nodes, which `doctor --nodes` looks at.
    names = [each for each in site.modules if " " not in each and each not in ("purge", "reset")]
    modules = available_modules() if names else None
    for each in names if modules is not None else []:
        if not any(one == each or one.startswith(f"{each}/") for one in modules or ()):
            yield f"site.modules: {each}: `module avail` does not list it"


def _options(site: SiteConfig, has_gpus: bool) -> dict[str, str]:
    launch = LaunchConfig(gpus_per_node=int(has_gpus), mem_gb=1, time_min=1)
    options = sbatch_options("init-site", launch, site, [1], lead_s=60)
    return {name: str(value) for name, value in options.items() if value is not True}
