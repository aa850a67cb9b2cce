"""Tables with many columns: the same values as with few, in time that is linear in the columns."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.formats.tables.columns import MANY, Column, numbers_of
from hpctrain.shards.index import Index
from tests.data_prep.read_back import rows

pytestmark = pytest.mark.usefixtures("here")


def test_columns_that_are_converted_together_have_the_same_values():
    kinds = [
        *(pa.int8(), pa.uint16(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()),
        *(pa.bool_(), pa.timestamp("us")),
    ]
    for kind in kinds:
        for cast in ("", "int8", "int64", "float32"):
            arrays = [pa.array([i % 2, 1, 0]).cast(kind) for i in range(MANY + 3)]
            if pa.types.is_integer(kind) and kind.bit_width == 64:
                arrays[3] = pa.array([2**62, 1, 0], kind)  # not possible in int8
            if kind == pa.float64():
                arrays[3] = pa.array([1e300, 1, 0], kind)
            arrays[5] = pa.array([1, None, 0]).cast(kind)
            batch = pa.record_batch(arrays, [f"c{i}" for i in range(len(arrays))])
            columns = [Column.of(name, kind, cast) for name in batch.schema.names]
            for part in (batch, batch.slice(1, 2), batch.slice(3)):
                found = numbers_of(part, columns)
                expected = {}
                for column in columns:
                    array = part[column.name]
                    if not column.problems(array):
                        expected[column.name] = column.values(array)
                if pa.types.is_integer(kind) or pa.types.is_floating(kind):
                    assert len(found) >= (MANY if part.num_rows else 0)
                for name, values in found.items():
                    assert values.dtype == expected[name].dtype
                    np.testing.assert_array_equal(values, expected[name])


@pytest.mark.parametrize("name", ["a.csv", pytest.param("a.parquet", marks=pytest.mark.slow)])
def test_more_columns_than_are_aligned(data_prep, name):
    """A shard of many small datasets is not padded, and is read like any other."""
    count = 1100  # more than hpctrain.shards.shard.MANY
    values = np.random.default_rng(0).integers(-100, 100, (7, count))
    table = pa.table({f"c{i}": values[:, i] / (1 + i % 2) for i in range(count)})
    table = table.append_column("text", pa.array([f"t{i}" for i in range(7)]))
    if name == "a.csv":
        table.to_pandas().to_csv(name, index=False)
    else:
        parquet.write_table(table, name)
    assert data_prep("table", name, "OUT")[0] == 0
    assert Index.load(Path("OUT")).shards[0].bytes < 700 * count
    found = rows()
    for i in range(count):
        assert (found[f"c{i}"] == values[:, i] / (1 + i % 2)).all()
    assert found["text"][6].tobytes() == b"t6"
    assert data_prep("inspect", "OUT", "--verify")[0] == 0
    stacked = ["--stack", "x=c*", "--cast", "x=float32"]
    assert (
        data_prep("table", name, "STACK", *stacked, "--columns", *[",".join(table.column_names)])[0]
        == 0
    )
    assert rows("STACK")["x"].tolist() == (values / (1 + np.arange(count) % 2)).tolist()


@pytest.mark.slow
def test_ten_thousand_columns(data_prep, here):
    count = 10_000
    header = ",".join(f"gene{i}" for i in range(count))
    line = ",".join(f"{i}.5" for i in range(count))
    Path("a.csv").write_text("\n".join([header, *[line] * 20]))
    assert data_prep("table", "a.csv", "OUT", "--workers", "1")[0] == 0
    assert rows()["gene9999"].tolist() == [9999.5] * 20
