"""All checks of a login node: versions, Slurm, storage, and the MLflow store."""

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpctrain.config.schema import TrackingConfig
from hpctrain.doctor.checks import file_systems, installed
from hpctrain.doctor.finding import Finding, good, unknown
from hpctrain.errors import TrackingError
from hpctrain.slurm import excluded_hosts
from hpctrain.tracking import store

_LOCKED_S = 2.0


def checked(
    output_dir: str, data: str, tracking: TrackingConfig, of_scheduler: Iterable[Finding]
) -> Iterator[Finding]:
    """Yield what is found here, on this host; `data` is "" if no data set is named."""
    yield from installed.checked()
    yield from of_scheduler
    yield from file_systems.checked("output_dir", Path(output_dir))
    yield from _data(data)
    yield mlflow_store(tracking)
    yield _excluded(output_dir)


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
    """Check `tracking.uri` without importing mlflow."""
    check, uri = "MLflow", str(tracking.uri)
    if not tracking.enabled:
        return good(check, "tracking.enabled=false")
    try:
        store.check_uri(uri)
        if store.is_server(uri):
            from hpctrain.tracking import server

            has = server.experiment_id(uri, tracking.experiment) is not None
            made = "is there" if has else "is made by the first run"
            return good(check, f"{uri} answers; experiment {tracking.experiment} {made}")
        store.experiment_id(uri, tracking.experiment)  # it may be deleted, or a stranger's
        return _sqlite(check, store.sqlite_path(uri))
    except TrackingError as error:
        return Finding(check, "fail", str(error), "a store", "Correct tracking.uri.")
    except OSError as error:
        cure = "Start the server; `status --upload` uploads what waits in journals until then."
        return Finding(check, "warn", f"{uri}: {error}", "an answer", cure)


def _sqlite(check: str, path: Path) -> Finding:
    if not path.exists():
        return good(check, f"{path} is made by the first run")
    try:
        with store.opened(path, "ro", _LOCKED_S) as database:
            said = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.OperationalError as error:
        return Finding(check, "warn", f"{path}: {error}", "a readable store", "Try again later.")
    except sqlite3.DatabaseError as error:
        said = str(error)
    if said != "ok":
        cure = "Move the file away; `hpctrain status --upload` writes all runs into a new one."
        return Finding(check, "fail", f"{path}: {said}", "an intact database", cure)
    return good(check, f"{path} is intact")
