"""The metrics of a run as a table in a file: one row for each value, in full resolution."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from hpctrain.disk import temporary
from hpctrain.errors import ConfigError, StorageError
from hpctrain.tracking import columns
from hpctrain.tracking.journal import journal_path

COLUMNS = ("step", "key", "value")


def write_table(run: Path, file: Path) -> int:
    """Write the metrics of a run that count, without superseded ones; return the number of rows.

    An existing `.csv` or `.parquet` file is replaced. The columns are step (int64), key (text) and
    value (float64; NaN and infinities are written as such). It raises a ConfigError if the file has
    another ending or pyarrow is missing, and a StorageError if there is no journal or it cannot be
    written.
    """
    kind = file.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise ConfigError(f"{file}: a table is a .csv or a .parquet file")
    if not journal_path(run).is_file():
        raise StorageError(f"{run}: nothing was tracked (no {journal_path(run)})")
    steps, keys, values = columns.read(journal_path(run))
    unfinished = temporary(file)
    try:
        if kind == ".csv":
            with unfinished.open("w", newline="", encoding="utf-8") as opened:
                writer = csv.writer(opened, lineterminator="\n")
                writer.writerow(COLUMNS)
                # `repr` gives the shortest text that reads back as the same number.
                rows = zip(steps.tolist(), keys.tolist(), map(repr, values.tolist()), strict=True)
                writer.writerows(rows)
        else:
            _write_parquet(unfinished, dict(zip(COLUMNS, (steps, keys, values), strict=True)))
        os.replace(unfinished, file)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written ({error.strerror or error})") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return len(steps)


def _write_parquet(path: Path, table: dict[str, object]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "a .parquet file needs the package pyarrow: pip install 'hpctrain[prep]', or take .csv"
        ) from error
    pyarrow.parquet.write_table(pyarrow.table(table), path)
