"""A site file: its text, how it is read again, and what in it the cluster of today has not."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpctrain.base.errors import ConfigError
from hpctrain.base.files import yaml_file
from hpctrain.cluster.slurm.sbatch_options import sbatch_options
from hpctrain.config.schema import ContainerConfig, LaunchConfig, SiteConfig
from hpctrain.insight.site.choices import Line, SiteFacts
from hpctrain.insight.site.surroundings import available_modules
from hpctrain.insight.site.trials import refusal


def text(head: Iterable[str], lines: Iterable[Line], notes: Iterable[str]) -> str:
    """Return the file: each line has a comment above it, which says where it is from."""
    parts = [*map(_comment, head), ""]
    for line in lines:
        parts += [_comment(line.why), _entry(line)]
    return "\n".join([*parts, "", *map(_comment, notes)]) + "\n"


def _comment(words: str) -> str:
    flat = " ".join(words.split())
    return textwrap.fill(
        flat, 98, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )


def _entry(line: Line) -> str:
    flow = None if isinstance(line.value, dict) else True
    entry: str = yaml.safe_dump({line.key: line.value}, default_flow_style=flow, width=10_000)
    return entry.strip().removeprefix("{").removesuffix("}") if flow else entry.rstrip()


def read(path: Path) -> SiteConfig:
    """Return the site of a file; what is no key, or has another type, is a ConfigError."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(SiteConfig), yaml_file.read(path) or {})
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    found: dict[str, Any] = OmegaConf.to_container(merged)  # type: ignore[assignment]
    return SiteConfig(**found | {"container": ContainerConfig(**found["container"])})


def misfits(site: SiteConfig, seen: SiteFacts) -> Iterator[str]:
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
