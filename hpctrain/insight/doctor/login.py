"""All checks of a login node: versions, Slurm, storage, and the MLflow store."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpctrain.cluster.slurm import excluded_hosts
from hpctrain.config.schema import TrackingConfig
from hpctrain.errors import ConfigError, TrackingError
from hpctrain.insight.doctor.checks import file_systems, installed
from hpctrain.insight.doctor.finding import Finding, good, judged, unknown
from hpctrain.insight.estimates import site_rules
from hpctrain.tracking import store


def checked(
    output_dir: str,
    data: str,
    tracking: TrackingConfig,
    of_scheduler: Iterable[Finding],
    rules: str | None = None,
    idle_minutes: float = 0.0,
) -> Iterator[Finding]:
    """Yield what is found here, on this host; `data` is "" if no data set is named."""
    yield from installed.checked()
    yield from of_scheduler
    yield from _rules(rules, idle_minutes)
    yield from file_systems.checked("output_dir", Path(output_dir))
    yield from _data(data)
    yield mlflow_store(tracking)
    yield _excluded(output_dir)


def _rules(path: str | None, idle_minutes: float) -> Iterator[Finding]:
    """Check the rules of the site, and that the monitor warns before its mail comes."""
    if path is None:
        return
    try:
        rules = site_rules.read(path)
    except ConfigError as error:
        yield Finding("site.rules", "fail", str(error), "rules", "Correct the file.")
        return
    most = rules["idle_job"].limit if "idle_job" in rules else math.inf
    cure = f"Set monitor.idle_minutes to less than {most:g}: else the site sees it first."
    shown = "; ".join(rule.says for rule in rules.values())
    yield judged("site.rules", idle_minutes < most, shown, f"idle_minutes below {most:g}", cure)


def _data(path: str) -> Iterator[Finding]:
    if not path:
        yield unknown("data.path", "no data set is named", "Add experiment=NAME or data.path=PATH.")
    elif "://" in path:
        yield unknown("data.path", f"{path} is a URL", "Its speed shows in `bench --data-only`.")
    else:
        yield file_systems.readable(Path(path))


def _excluded(output_dir: str) -> Finding:
    hosts = excluded_hosts.read(output_dir)
    if not hosts:
        return good("excluded nodes", "none")
    shown = ", ".join(f"{host} ({facts.why})" for host, facts in sorted(hosts.items()))
    cure = (
        "New jobs avoid them until they pass a check: `python -m hpctrain doctor --nodes 1 "
        f"+site.sbatch.nodelist={min(hosts)}`."
    )
    return Finding("excluded nodes", "warn", shown, "none", cure)


def mlflow_store(tracking: TrackingConfig) -> Finding:
    """Check `tracking.uri` as a submission does, without importing mlflow."""
    check, uri = "MLflow", str(tracking.uri)
    if not tracking.enabled:
        return good(check, "tracking.enabled=false")
    try:
        store.check_uri(uri)
        if not store.is_server(uri) and not store.sqlite_path(uri).exists():
            return good(check, f"{uri} is made by the first run")
        takes = store.check_store(uri, tracking.experiment)
    except TrackingError as error:
        return Finding(check, "fail", str(error), "a store", "Correct tracking.uri.")
    cure = "Start the server; `status --upload` uploads what waits in journals until then."
    said = "takes runs" if takes else "takes no runs now: the log says why"
    return judged(check, takes, f"{uri} {said}", "a store that takes runs", cure)
