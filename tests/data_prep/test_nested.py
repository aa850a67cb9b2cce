"""Structs and lists of structs as fields; decimals with a cast."""

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from data_prep.formats.tables import nested
from data_prep.formats.tables.columns import Column
from hpctrain.shards.index import Index
from tests.data_prep.read_back import fields, rows

POINT = pa.struct([("x", pa.int32()), ("at", pa.struct([("y", pa.float64())]))])
COLUMNS = {
    "s": pa.array([{"x": 1, "at": {"y": 0.5}}, {"x": 2, "at": {"y": 1.5}}] * 2, POINT),
    "some": pa.array(
        [[{"x": 1, "at": {"y": 2}}], [], [{"x": 3, "at": {"y": 4}}, {"x": 5, "at": {"y": 6}}], []],
        pa.list_(POINT),
    ),
    "pair": pa.array([[{"x": i, "at": {"y": i}}] * 2 for i in range(4)], pa.list_(POINT, 2)),
    "n": pa.array([1, 2, 3, 4], pa.int8()),
}


pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_structs_become_fields(data_prep, name):
    table = pa.table(COLUMNS)
    if name == "a.arrow":
        feather.write_feather(table, name, compression="uncompressed")
    else:
        parquet.write_table(table, name, row_group_size=3)
    assert data_prep("table", name, "OUT", "--workers", "1")[0] == 0
    assert fields() == {
        "s.x": "int32",
        "s.at.y": "float64",
        "some.x": "int32[*]",
        "some.at.y": "float64[*]",
        "pair.x": "int32[2]",
        "pair.at.y": "float64[2]",
        "n": "int8",
    }
    found = rows()
    assert found["s.x"].tolist() == [1, 2, 1, 2]
    assert found["s.at.y"].tolist() == [0.5, 1.5, 0.5, 1.5]
    assert [found["some.at.y"][i].tolist() for i in range(4)] == [[2], [], [4, 6], []]
    assert found["pair.x"].tolist() == [[i, i] for i in range(4)]
    chosen = ["--columns", "some.x,n", "--rename", "some.x=x", "--cast", "some.x=int64"]
    assert data_prep("table", name, "SOME", *chosen)[0] == 0
    assert fields("SOME") == {"x": "int64[*]", "n": "int8"}


def test_a_slice_of_nested_arrays_is_what_it_shows():
    """Also where structs or lists are null."""
    none = {
        "s": pa.array([None, {"x": 2, "at": None}, {"x": None, "at": {"y": 1}}], POINT),
        "some": pa.array([None, [None], [{"x": 3, "at": {"y": 4}}]], pa.list_(POINT)),
        "large": pa.array([[{"x": 3, "at": None}], None, []], pa.large_list(POINT)),
        "pair": pa.array([None, [{"x": 1, "at": {"y": 1}}] * 2, [None, None]], pa.list_(POINT, 2)),
    }
    for columns in (COLUMNS, none):
        batch = pa.record_batch(columns)
        names = nested.flat_schema(batch.schema).names
        for part in (batch, batch.slice(1), batch.slice(1, 1), batch.slice(3)):
            found = nested.select(part, names)
            found.validate(full=True)
            assert found.schema.types == nested.flat_schema(batch.schema).types
            for name in names:
                top, *path = name.split(".")
                expected = part[top].to_pylist()
                for key in path:
                    expected = [below(value, key) for value in expected]
                assert found[name].to_pylist() == expected


def below(value, key):
    if isinstance(value, list):
        return [below(each, key) for each in value]
    return None if value is None else value[key]


def test_a_null_struct_is_a_row_that_cannot_be_used(data_prep):
    parquet.write_table(pa.table({"s": pa.array([{"x": 1}, None, {"x": 3}])}), "a.parquet")
    err = data_prep.refused("table", "a.parquet", "OUT")
    assert "a.parquet: row 2: column 's.x' is null; --null s.x=VALUE gives" in err
    assert data_prep("table", "a.parquet", "OUT", "--null", "s.x=7")[0] == 0
    assert rows()["s.x"].tolist() == [1, 7, 3]


def test_a_member_with_the_name_of_a_column_is_refused(data_prep):
    parquet.write_table(pa.table({"s": [{"x": 1}], "s.x": [2]}), "a.parquet")
    err = data_prep.refused("table", "a.parquet", "OUT")
    assert "a.parquet has more than one column 's.x'" in err


def test_decimals_are_cast_exactly_or_refused():
    values = ["9007199254740993", "1.50", "1e30", "-128", None]
    array = pa.array([None if v is None else Decimal(v) for v in values], pa.decimal128(38, 2))
    column = Column.of("d", array.type, "int64")
    assert sorted(column.problems(array)) == [1, 2, 4]
    assert column.values(array.take([0, 3])).tolist() == [2**53 + 1, -128]
    assert sorted(Column.of("d", array.type, "int8").problems(array)) == [0, 1, 2, 4]
    floats = Column.of("d", array.type, "float64")
    assert sorted(floats.problems(array)) == [4]
    assert floats.values(array.slice(0, 4)).tolist() == [2.0**53, 1.5, 1e30, -128]


def test_dicts_of_hugging_face(data_prep):
    import datasets
    from datasets import ClassLabel, Dataset, Features, List, Value

    datasets.disable_progress_bars()
    features = Features(
        {
            "box": {"kind": ClassLabel(names=["a", "b"]), "size": List(Value("int16"), length=2)},
            "words": List({"id": Value("int32"), "score": Value("float32")}),
            "price": Value("decimal128(10, 2)"),
        }
    )
    content = {
        "box": [{"kind": "b", "size": [1, 2]}, {"kind": "a", "size": [3, 4]}],
        "words": [[{"id": 1, "score": 0.5}], []],
        "price": [Decimal("1.25"), Decimal("2.50")],
    }
    Dataset.from_dict(content, features=features).save_to_disk("in")
    err = data_prep.refused("huggingface", "in", "OUT")
    assert "in: the column 'price' is decimal128(10, 2): no field holds such numbers; --c" in err
    assert data_prep("huggingface", "in", "OUT", "--cast", "price=float32")[0] == 0
    assert fields() == {
        "box.kind": "int64",
        "box.size": "int16[2]",
        "words.id": "int32[*]",
        "words.score": "float32[*]",
        "price": "float32",
    }
    found = rows()
    assert found["box.kind"].tolist() == [1, 0]
    assert found["box.size"].tolist() == [[1, 2], [3, 4]]
    assert [found["words.id"][i].tolist() for i in range(2)] == [[1], []]
    assert found["price"].tolist() == [1.25, 2.5]
    assert Index.load(Path("OUT")).categories == {"box.kind": ("a", "b")}
