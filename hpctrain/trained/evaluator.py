"""Evaluates a checkpoint of a run as the training itself does, on any ranks."""

from __future__ import annotations

from pathlib import Path

from hpctrain.config.schema import Config
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.distributed.long_work import first_in_long_work
from hpctrain.errors import ConfigError
from hpctrain.parallel.reducing.metric_states import Measured
from hpctrain.tasks import derived
from hpctrain.trained.restored import Restored, restored
from hpctrain.training.step import Totals


def evaluate(config: Config, checkpoint: Path, folder: Path) -> dict[str, float]:
    """Return the mean of each metric over the evaluation split, whose samples all count once.

    It is `data.val_split`, or the fold that `data.fold` holds out.

    All ranks that were started call this together, and get the same numbers.

    The config is that of the run, with the split and the data that are meant. Without a split, or
    with a layout that does not fit the ranks, it is a ConfigError.
    """
    if config.data.evaluated is None:
        raise ConfigError("data.val_split=null: the run has no evaluation; give --split NAME")
    with restored(config, checkpoint, folder) as trained:
        feed = trained.data.evaluation()
        assert feed is not None
        return _means(trained, feed)


def evaluate_all(config: Config, checkpoint: Path, folder: Path) -> dict[str, float]:
    """Return the metrics of all validation splits, by the names that the training gives them.

    All ranks call this together. The arguments and errors are those of `evaluate`.
    """
    data = config.data
    if data.evaluated is None and not data.other_sets:
        raise ConfigError("data.val_split=null: the run has no evaluation")
    sets: dict[str, tuple[str | None, str | None]] = {}
    if data.evaluated is not None:
        sets["val"] = None, None
    sets |= {f"val/{name}": one for name, one in data.other_sets.items()}
    values: dict[str, float] = {}
    with restored(config, checkpoint, folder) as trained:
        for prefix, (path, split) in sets.items():
            feed = trained.data.evaluation(split, path)
            assert feed is not None
            means = _means(trained, feed)
            values |= {f"{prefix}/{name}": value for name, value in means.items()}
    return values


def _means(trained: Restored, feed: DevicePrefetcher) -> dict[str, float]:
    totals, measured = Totals(), Measured(trained.task, trained.model.mesh)
    count = feed.loader.count
    try:
        with trained.progress(count, "evaluated ") as shown:
            for batch in first_in_long_work("the first batch of the evaluation", feed):
                totals.add(*trained.model.evaluate(measured.task, batch))
                measured.update()
                shown.advance(min(feed.batch_size, count - shown.samples), 0)
    finally:
        feed.close()
    totals.reduce(trained.model.mesh)
    return derived(trained.task, totals.means()) | measured.values()
