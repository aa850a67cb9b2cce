"""One run in MLflow. It is written in batches, and each batch stores the position in the journal.

MLflow chooses run ids itself, so a run is found by its tag `hpctrain.uid`. The tag
`hpctrain.cursor` holds the position up to which everything is in the store (stored runs have this
name, so it stays). It is sent in the same `log_batch` as the data. MLflow commits metrics before
tags, and ignores a metric that it already has with the same step, time and value. So an uploader
that is killed repeats at most one batch, and no value is stored twice.
"""

import logging
import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from hpctrain.base.errors import TrackingError
from hpctrain.base.names.metric_names import better
from hpctrain.tracking import server, store
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.store import clean_key
from hpctrain.tracking.uploading.client import connect, experiment_id, import_mlflow, nature

log = logging.getLogger(__name__)

T = TypeVar("T")

# MLflow's limits: entries of a batch, characters of a param and a tag.
BATCH = 1000
_PARAM = 6000
_TAG = 8000

_POSITION = "hpctrain.cursor"
_UID = "hpctrain.uid"
_PARENT = "mlflow.parentRunId"

_FIRST_PAUSE = 0.5  # seconds
_LONGEST_PAUSE = 30.0
_LOCK_SECONDS = 10.0  # after this it counts as a failed try, and `pause` decides about another


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    time: float
    step: int


class DeletedError(TrackingError):
    """The run was deleted in MLflow, so that nothing can be uploaded until it is restored."""

    def __init__(self, run_id: str, uri: str) -> None:
        super().__init__(
            f"the run is deleted in MLflow: restore it there, or with `MLFLOW_TRACKING_URI={uri} "
            f"mlflow runs restore --run-id {run_id}`"
        )
        self.run_id = run_id


class MlflowRun:
    """A run in an MLflow store. The constructor finds or creates it.

    `start_time` is that of the journal's first record, in seconds since the epoch. `pause` is
    called between two tries with a number of seconds: it sleeps, or raises to give up. `connected`
    is called when MLflow has started and opened its store, or can ask the server. Every method
    can raise DeletedError: the run is deleted in MLflow. Everything up to `position` in the journal
    is in the store. `params` cannot change there; `tags` are those that the run had when it was
    opened.
    """

    def __init__(
        self,
        meta: Meta,
        start_time: float,
        pause: Callable[[float], None],
        connected: Callable[[], None],
    ) -> None:
        self._meta = meta
        self._pause = pause
        import_mlflow()
        self._client = self._call(connect, meta.uri)
        connected()
        self.experiment_id = self._call(experiment_id, self._client, meta.uri, meta.experiment)
        self.parent_id = self._open_parent(start_time) if meta.parent_uid else None
        # A deleted run directory and a new one can have the same name and uid. The new one has its
        # own journal, so it needs its own MLflow run and position. Their start times differ.
        same_journal = f" and attributes.start_time = {_milliseconds(start_time)}"
        run = self._call(
            self._find_or_create, meta.uid, meta.run_name, start_time, self.parent_id, same_journal
        )
        self.run_id: str = run.info.run_id
        self._place = str(run.info.artifact_uri)
        if store.is_server(meta.uri):
            server.check_place(meta.uri, self._place)
        if run.info.lifecycle_stage != "active":
            raise DeletedError(self.run_id, meta.uri)
        self.position = int(run.data.tags.get(_POSITION, 0))
        self.params: dict[str, str] = dict(run.data.params)
        self.tags: dict[str, str] = dict(run.data.tags)
        if self.parent_id and _PARENT not in self.tags:
            # The run was made before its sweep. It may be the last of the sweep's runs.
            self._call(self._client.set_tag, self.run_id, _PARENT, self.parent_id)
            if run.info.status != "RUNNING":
                self._end_parent(run.info.end_time or _milliseconds(start_time))

    def log_points(
        self, points: list[Point], position: int, notes: Mapping[str, str] | None = None
    ) -> None:
        """Log metrics, then store the position, and more tags that say what is in the store."""
        from mlflow.entities import Metric

        metrics = [Metric(clean_key(p.key), p.value, _milliseconds(p.time), p.step) for p in points]
        tags = self._tags({**(notes or {}), _POSITION: str(position)})
        if len(metrics) + len(tags) > BATCH:  # MLflow would send the tags with the first of several
            self._log_batch(metrics=metrics)
            metrics = []
        self._log_batch(metrics=metrics, tags=tags)

    def log_params(self, params: dict[str, str], position: int) -> None:
        """Log params, then store the position.

        A param that the run has with another value becomes the tag `hpctrain.changed.KEY`.
        """
        from mlflow.entities import Param

        cleaned = {clean_key(key): _shorten(value, _PARAM) for key, value in params.items()}
        new = {key: value for key, value in cleaned.items() if key not in self.params}
        changed = {
            key: value for key, value in cleaned.items() if self.params.get(key, value) != value
        }
        self._log_batch(params=[Param(key, value) for key, value in new.items()])
        self.params.update(new)
        tags = {f"hpctrain.changed.{key}": value for key, value in changed.items()}
        self.log_tags(tags, position)

    def log_tags(self, tags: dict[str, str], position: int) -> None:
        """Set tags, then store the position."""
        self._log_batch(tags=self._tags({**tags, _POSITION: str(position)}))

    def send(self, file: Path, folder: str = "") -> None:
        """Send a file into a folder of the run, such as `images`; it replaces one of its name."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        # The client of MLflow would ask the store for the place again with each file.
        repository = get_artifact_repository(self._place, tracking_uri=self._meta.uri)
        repository.log_artifact(str(file), folder or None)

    def send_text(self, text: str, name: str) -> None:
        """Send a text as the file `name`, such as `logs/7.rank0.log`."""
        *folders, last = Path(name).parts
        with TemporaryDirectory() as folder:
            file = Path(folder, last)
            file.write_text(text, encoding="utf-8")
            self.send(file, "/".join(folders))

    def call_once(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of MLflow's client with the id of this run; an error is the caller's."""
        return self._try(getattr(self._client, method), self.run_id, *args, **kwargs)

    def tell_parent(self, metric: str) -> None:
        """Give the sweep's run the best value of its finished runs: in a table it is one row.

        A run that ends at the same moment may have written an older answer, so it is asked again.
        """
        direction, key = better(metric), clean_key(metric)
        if not self.parent_id or direction is None:
            return
        query = f"tags.`{_PARENT}` = '{self.parent_id}' and attributes.status = 'FINISHED'"
        order = [f"metrics.`{key}` {'ASC' if direction == 'lower' else 'DESC'}"]
        told = ""
        while True:
            found = self._call(
                self._client.search_runs, [self.experiment_id], query, max_results=1, order_by=order
            )
            if not found or key not in found[0].data.metrics or found[0].info.run_id == told:
                return
            told = found[0].info.run_id
            self._call_parent("log_metric", key, found[0].data.metrics[key])
            self._call_parent("set_tag", "hpctrain.sweep.best", found[0].info.run_name)

    def _call_parent(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of MLflow's client with the id of the sweep's run, unless it is deleted.

        Without that run, this one is still complete.
        """
        with suppress(DeletedError):
            self._call(getattr(self._client, method), self.parent_id, *args, **kwargs)

    def set_running(self) -> None:
        """Set the status of the run and of its sweep to RUNNING."""
        self._call(self._client.update_run, self.run_id, status="RUNNING")
        if self.parent_id:
            self._call_parent("update_run", status="RUNNING")

    def set_ended(self, status: str, end_time: float) -> None:
        """Set the final status; end the sweep too if no other run of it is RUNNING."""
        self._call(self._client.set_terminated, self.run_id, status, _milliseconds(end_time))
        if self.parent_id:
            self._end_parent(_milliseconds(end_time))

    def _end_parent(self, end_time: int) -> None:
        """End the sweep, at `end_time` in milliseconds, unless a run of it is RUNNING."""
        query = f"tags.`{_PARENT}` = '{self.parent_id}' and attributes.status = 'RUNNING'"
        if not self._call(self._client.search_runs, [self.experiment_id], query, max_results=1):
            self._call_parent("set_terminated", "FINISHED", end_time)

    def _open_parent(self, start_time: float) -> str:
        """Return the id of the MLflow run that stands for the sweep."""
        uid, name = self._meta.parent_uid, self._meta.parent_name
        assert uid is not None
        run = self._call(self._find_or_create, uid, name or uid, start_time, None)
        return str(run.info.run_id)

    def _find_or_create(
        self, uid: str, name: str, start_time: float, parent: str | None, condition: str = ""
    ) -> Any:
        from mlflow.entities import ViewType

        query = f"tags.`{_UID}` = '{uid}'{condition}"
        # If two nodes have created the same parent at once, all nodes take the oldest.
        order = ["attributes.start_time ASC", "attributes.run_id ASC"]
        # A run that is deleted for a while must not get a twin; a parent that is deleted gets one.
        view = ViewType.ALL if condition else ViewType.ACTIVE_ONLY
        found = self._client.search_runs([self.experiment_id], query, view, 10, order)
        if found:
            return next((run for run in found if run.info.lifecycle_stage == "active"), found[0])
        user = os.environ.get("USER") or str(os.getuid())
        tags = {_UID: uid, "mlflow.user": user, "mlflow.source.type": "JOB"}
        if parent:
            tags[_PARENT] = parent
        log.info("creating run %s (%s)", name, uid)
        return self._client.create_run(
            self.experiment_id, start_time=_milliseconds(start_time), tags=tags, run_name=name
        )

    def _log_batch(self, **batch: list[Any]) -> None:
        """Log entries in order; if MLflow rejects them, log all but those that are at fault."""
        try:
            self._call(self._client.log_batch, self.run_id, **batch, synchronous=True)
        except Exception as error:
            if nature(error) != "rejected":
                raise
            for kind, entries in batch.items():
                if len(entries) == 1 and len(batch) == 1:
                    log.error("MLflow rejects %s: %s", entries[0], error)
                    continue
                # Tags come last in `batch`: the position is stored after the data.
                middle = (len(entries) + 1) // 2
                for half in filter(None, (entries[:middle], entries[middle:])):
                    self._log_batch(**{kind: half})

    def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function` again and again after transient errors."""
        delay = _FIRST_PAUSE
        while True:
            try:
                return self._try(function, *args, **kwargs)
            except Exception as error:
                if isinstance(error, DeletedError) or nature(error) != "transient":
                    raise
                log.warning("%s; trying again in %.1f s", " ".join(str(error).split())[:500], delay)
                # Inside the handler, so that an exception of `pause` carries this one as context.
                self._pause(delay * random.uniform(0.7, 1.0))
            delay = min(2 * delay, _LONGEST_PAUSE)

    def _try(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function` under the store's write lock."""
        try:
            with store.write_lock(self._meta.uri, _LOCK_SECONDS):
                return function(*args, **kwargs)
        except Exception as error:
            if nature(error) == "deleted":
                raise DeletedError(self.run_id, self._meta.uri) from error
            raise

    @staticmethod
    def _tags(tags: dict[str, str]) -> list[Any]:
        from mlflow.entities import RunTag

        return [RunTag(clean_key(key), _shorten(value, _TAG)) for key, value in tags.items()]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _shorten(value: str, limit: int) -> str:
    if len(value) <= limit:
        return value
    note = f"... ({len(value)} characters; whole in the journal)"
    return value[: limit - len(note)] + note
