"""Earlier runs of the same model.

Only the newest runs of `output_dir` are looked at, and their names are read once for a sweep.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from heapq import nlargest
from pathlib import Path
from typing import Any

from hpctrain.base.files.disk import text_of
from hpctrain.config.frozen import dump
from hpctrain.config.schema import Config
from hpctrain.errors import HpctrainError
from hpctrain.insight.estimates.measured_run import MeasuredRun, measured_run

_MOST_RUNS = 200


def runs_of_model(model: Mapping[str, Any], output_dir: str) -> Iterator[MeasuredRun]:
    """Yield the runs with enough steps in a folder whose section `model` is the same, newest first.

    The path of the folder is absolute.
    """
    candidates = _candidates(output_dir)
    wanted = _model(dump(Config(model={**model}))) if candidates else ""
    for path, text in candidates:
        if text == wanted:
            try:
                found = measured_run(path)
            except (HpctrainError, OSError, ValueError, LookupError, TypeError, AttributeError):
                continue  # it is damaged
            if found is not None:
                yield found


@functools.lru_cache(maxsize=16)
def _candidates(output_dir: str) -> tuple[tuple[Path, str], ...]:
    """Return the newest runs that have a journal, each with the text of its model."""
    journals = Path(output_dir).glob("*/journal/events.jsonl")
    newest = [file.parents[1] for file in nlargest(_MOST_RUNS, journals, key=_changed)]
    return tuple((path, _model(text_of(path / "config.yaml"))) for path in newest)


def _changed(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _model(text: str) -> str:
    """Return the section `model` of a frozen config, which has the same text for the same model."""
    found = re.search(r"^model:.*\n([ -].*\n)*", text, re.MULTILINE)
    return found[0] if found else ""
