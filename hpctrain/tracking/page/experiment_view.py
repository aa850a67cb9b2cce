"""The view of an experiment in MLflow that shows the main metrics of its runs as columns.

MLflow's own first view has no metric. A view that is shared has a name in an address, and is kept
in a tag of the experiment; our addresses name it, and MLflow lists it under "Views".
"""

from __future__ import annotations

import json
import time
from typing import Any

NAME = "hpctrain"
TAG = f"mlflow.sharedViewState.{NAME}"
_TITLE = "main metrics"
_MOST = 8  # columns of metrics


def with_column(before: str, metric: str) -> str | None:
    """Return the tag with a metric more; None if it has the metric, or is not ours to change.

    Args:
        before: The tag; "" if the experiment has none.
        metric: The name of the metric in MLflow.
    """
    column, now = f"metrics.`{metric}`", round(time.time() * 1000)
    try:
        view: dict[str, Any] = {"name": _TITLE, "createdAt": now}
        view |= json.loads(before or "{}")
        state = json.loads(view.get("state", "{}"))
        columns = list(state.get("selectedColumns", ()))
    except (ValueError, TypeError, AttributeError):
        return None
    if column in columns or len(columns) >= _MOST:
        return None
    state = {"columnOrder": [], "columnWidths": {}, **state, "selectedColumns": [*columns, column]}
    return json.dumps({**view, "updatedAt": now, "state": json.dumps(state)})
