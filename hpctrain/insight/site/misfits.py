"""What a site file says that the cluster of today does not have."""

import re
from collections.abc import Iterator, Sequence

from hpctrain.cluster.slurm.sbatch_options import sbatch_options
from hpctrain.config.schema import LaunchConfig, SiteConfig
from hpctrain.insight.site.choices import Seen
from hpctrain.insight.site.surroundings import available_modules, interfaces
from hpctrain.insight.site.trials import refusal


def found(site: SiteConfig, seen: Seen) -> Iterator[str]:
    """Yield a sentence for each line that does not fit; the last one is sbatch's own word."""
    names = site.partition.split(",") if site.partition else []
    there = {kind.partition: kind.is_open for kind in seen.kinds}
    for name in names:
        if not there.get(name):
            said = "is closed" if name in there else _no("partition", [*there])
            yield f"site.partition={name}: {said}"
    mine = [kind for kind in seen.kinds if not names or kind.partition in names]
    if seen.associations is not None:
        accounts = [each.account for each in seen.associations]
        if site.account and site.account not in accounts:
            yield f"site.account={site.account}: {_no('account of yours', accounts)}"
        allowed = [
            name
            for each in seen.associations
            if site.account in (None, each.account)
            for name in each.qos
        ]
        if site.qos and site.qos not in allowed:
            yield f"site.qos={site.qos}: {_no('QOS of yours', allowed)}"
    features = [each for kind in mine for each in kind.features]
    for word in re.findall(r"[^\s&|,()\[\]*\"]+", site.constraint or ""):
        if not word.isdecimal() and word not in features:
            yield f"site.constraint={site.constraint}: {_no(f'feature {word}', features)}"
    types = [each for kind in mine for each in kind.gpus if each]
    if site.gpu_type and site.gpu_type not in types:
        yield f"site.gpu_type={site.gpu_type}: {_no('type of GPU', types)}"
    yield from _of_host(site, seen)
    if said := refusal(_options(site, has_gpus=any(kind.gpus for kind in mine))):
        yield f"sbatch --test-only refuses a job of this site: {said}"


def _no(what: str, there: Sequence[str]) -> str:
    return f"there is no {what}, but {', '.join(dict.fromkeys(there)) or 'none at all'}"


def _of_host(site: SiteConfig, seen: Seen) -> Iterator[str]:
    here = interfaces(seen.net)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = str(site.env.get(name, ""))
        for each in text.lstrip("=").split(",") if text and text[0] != "^" else []:
            if not any(one.startswith(each) for one in here):
                yield f"site.env.{name}={each}: {_no('such interface on this host', here)}"
    names = [each for each in site.modules if " " not in each and each not in ("purge", "reset")]
    modules = available_modules() if names else None
    for each in names if modules is not None else []:
        if not any(one == each or one.startswith(f"{each}/") for one in modules or ()):
            yield f"site.modules: {each}: `module avail` does not list it"


def _options(site: SiteConfig, has_gpus: bool) -> dict[str, str]:
    launch = LaunchConfig(gpus_per_node=int(has_gpus), mem_gb=1, time_min=1)
    options = sbatch_options("init-site", launch, site, [1], lead_s=60)
    return {name: str(value) for name, value in options.items() if value is not True}
