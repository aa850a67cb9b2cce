"""The metrics of a journal as columns, in little memory: 28 bytes for each value while reading."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.tracking import journal


def read(path: Path) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.float64]]:
    """Read the metrics of a journal, sorted by step and key.

    Metrics that a resumed attempt has superseded are left out. If a step has a key twice, the later
    value counts. The steps are int64 (n,), the keys text (n,), the values float64 (n,).
    """
    steps, codes, values = array("q"), array("i"), array("d")  # one item for each value
    places = array("q")  # the positions of their records
    superseded: list[tuple[int, int]] = []
    numbers: dict[str, int] = {}
    for record in journal.read_all(path) if path.is_file() else ():
        body = record.body
        if body["kind"] == "metrics":
            found = body["metrics"]
            places.extend([record.start] * len(found))
            steps.extend([body["step"]] * len(found))
            codes.extend([numbers.setdefault(key, len(numbers)) for key in found])
            values.extend(map(float, found.values()))
        elif body["kind"] == "superseded":
            superseded.append((body["from"], min(body["to"], record.start)))
    kept, place = np.ones(len(steps), np.bool_), np.frombuffer(places, np.int64)
    for begin, stop in superseded:
        kept &= (place < begin) | (place >= stop)
    # Sorted by step and name; the sort is stable, so that the last one of equals is the latest.
    names = np.array(sorted(numbers), object)
    rank = np.empty(len(numbers), np.intc)
    rank[np.argsort(np.array([*numbers], object))] = np.arange(len(numbers))
    step, code = np.frombuffer(steps, np.int64)[kept], rank[np.frombuffer(codes, np.intc)[kept]]
    order = np.lexsort((code, step))
    step, code = step[order], code[order]
    last = np.ones(len(step), np.bool_)
    last[:-1] = (np.diff(step) != 0) | (np.diff(code) != 0)
    return step[last], names[code[last]], np.frombuffer(values, np.float64)[kept][order][last]
