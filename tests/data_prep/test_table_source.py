"""`data_prep table` converts CSV and Parquet files."""

import datetime as dt
import gzip
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.formats.tables import csv_files
from data_prep.formats.tables.columns import Column
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.ragged import Ragged
from tests.data_prep.read_back import as_text, fields, problems, rows

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


pytestmark = pytest.mark.usefixtures("here")


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix == ".h5"}


@pytest.mark.parametrize("name", ["d.csv", "d.tsv.gz"])
@pytest.mark.usefixtures("any_workers")
def test_the_digits(data_prep, name):
    import pandas as pd
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    frame = pd.DataFrame(images.astype(int), columns=[f"p{i}" for i in range(64)])
    frame["label"] = [WORDS[label] for label in labels]
    frame.to_csv(name, index=False, sep="\t" if "tsv" in name else ",")
    for out, workers in (("ONE", 1), ("TWO", 2)):
        code, _, err = data_prep(
            *("table", name, out, "--stack", "image=p*", "--cast", "image=uint8"),
            *("--categorical", "label", "--shard-size", "40KB", "--workers", workers),
        )
        assert (code, err) == (0, "")
    assert contents("ONE") == contents("TWO")
    assert fields("ONE") == {"image": "uint8[64]", "label": "int32"}
    found = rows("ONE")
    assert (found["image"] == images).all()
    names = sorted(WORDS)
    assert [names[code] for code in found["label"]] == [WORDS[label] for label in labels]
    assert len(Index.load(Path("ONE")).shards) >= 3


COLUMNS = pa.table(
    {
        "i8": pa.array([1, -2, 3], pa.int8()),
        "u32": pa.array([1, 2, 2**32 - 1], pa.uint32()),
        "u64": pa.array([1, 2, 2**63 - 1], pa.uint64()),
        "f16": pa.array(np.array([0.5, 1, 2], np.float16)),
        "f32": pa.array([0.1, 0.2, float("nan")], pa.float32()),
        "flag": [True, False, True],
        "text": ["ä", "", "long\nwörd"],
        "view": pa.array(["a", "bc", ""], pa.string_view()),
        "raw": [b"\x00\xff", b"", b"x"],
        "day": [dt.date(1970, 1, 2), dt.date(1969, 12, 31), dt.date(2026, 1, 1)],
        "when": pa.array([1, 2, -3], pa.timestamp("us", "UTC")),
        "at": pa.array([1, 2, 3], pa.time32("ms")),
        "took": pa.array([1, 2, 3], pa.duration("ms")),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
        "square": pa.array([[[1, 2], [3, 4]]] * 3, pa.list_(pa.list_(pa.float64(), 2), 2)),
        "list": pa.array([[1.5], [], [2.5, 3.5]], pa.list_(pa.float32())),
        "points": pa.array([[[1, 2]], [], [[3, 4], [5, 6]]], pa.large_list(pa.list_(pa.int8(), 2))),
        "flags": pa.array([[True], [False, True], []], pa.list_(pa.bool_())),
        "coded": pa.array(["x", "y", "x"]).dictionary_encode(),
    }
)


def test_each_type(data_prep):
    table = COLUMNS.drop_columns(["f16"])
    parquet.write_table(table, "a.parquet")
    assert data_prep("table", "a.parquet", "OUT")[0] == 0
    expected = {
        "i8": "int8",
        "u32": "uint32",
        "u64": "int64",
        "f32": "float32",
        "flag": "uint8",
        "text": "uint8[*]",
        "view": "uint8[*]",
        "raw": "uint8[*]",
        "day": "int64",
        "when": "int64",
        "at": "int64",
        "took": "int64",
        "fixed": "int16[2]",
        "square": "float64[2, 2]",
        "list": "float32[*]",
        "points": "int8[*, 2]",
        "flags": "uint8[*]",
        "coded": "uint8[*]",
    }
    assert fields("OUT") == {name: expected[name] for name in table.column_names}
    found = rows("OUT")
    assert found["u64"].tolist() == [1, 2, 2**63 - 1]
    np.testing.assert_array_equal(found["f32"], np.array([0.1, 0.2, np.nan], np.float32))
    assert found["flag"].tolist() == [1, 0, 1]
    for name in ("text", "view", "coded"):
        assert as_text(found[name]) == table[name].to_pylist()
    assert [found["raw"][i].tobytes() for i in range(3)] == table["raw"].to_pylist()
    assert found["day"].tolist() == [1, -1, 20454]
    assert found["when"].tolist() == [1, 2, -3]
    assert found["at"].tolist() == found["took"].tolist() == [1, 2, 3]
    for name in ("list", "points", "flags"):
        assert [found[name][i].tolist() for i in range(3)] == table[name].to_pylist()
    assert found["square"].tolist() == table["square"].to_pylist()
    types = Index.load(Path("OUT")).provenance["source"]["types"]
    assert types["when"] == "timestamp[us, tz=UTC]"
    assert types["day"] == "date32[day]"


def test_a_slice_of_an_array_is_what_it_shows():
    """An Arrow array may be a view of a larger array."""
    for name in COLUMNS.column_names:
        array = COLUMNS[name].combine_chunks()
        column = Column.of(name, array.type)
        for start, stop in ((1, 3), (0, 2), (2, 3)):
            whole, part = column.values(array), column.values(array.slice(start, stop - start))
            expected = [whole[i] for i in range(start, stop)]
            assert len(part) == stop - start
            for i, value in enumerate(expected):
                np.testing.assert_array_equal(part[i], value)
            assert isinstance(part, Ragged) == column.field.variable


@pytest.mark.parametrize(
    "to", ["int8", "uint8", "uint32", "int64", "float16", "float32", "float64"]
)
@pytest.mark.parametrize("of", ["int8", "uint16", "int64", "uint64", "float32", "float64"])
def test_a_cast_keeps_each_value_or_says_that_it_cannot(of, to):
    values = [0, 1, -1, 127, 128, 255, 256, 2047, 2049, 2**24, 2**24 + 1, 2**31, 2**32 - 1]
    values += [2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
    if of.startswith("float"):
        values += [0.5, 1e39, 65504.0, 65536.0, float("inf"), float("nan")]
        with np.errstate(over="ignore"):
            array = pa.array(np.array(values, of))
    else:
        info = np.iinfo(of)
        array = pa.array([v for v in values if info.min <= v <= info.max], of)
    column = Column.of("x", array.type, to)
    bad = column.problems(array)
    with np.errstate(all="ignore"):
        stored = column.values(array)
    for i, value in enumerate(array.to_pylist()):
        number = stored[i].item()
        both_floats = of.startswith("float") and to.startswith("float")
        kept = number == value or (both_floats and value != value)
        if both_floats:  # rounding is allowed
            kept = kept or np.isfinite(number)
        assert kept == (i not in bad), (value, number)


def test_rows_that_cannot_be_used_are_named(data_prep):
    table = pa.table(
        {
            "x": pa.array([1, 300, None, -1, 5, 6], pa.int64()),
            "l": pa.array([[1], [2], [3], [4], [5, None], None], pa.list_(pa.int64())),
            "k": ["a", "b", "a", "b", None, "c"],
        }
    )
    parquet.write_table(table, "a.parquet", row_group_size=2)
    command = ["table", "a.parquet", "OUT", "--cast", "x=uint8", "--workers", "1"]
    err = data_prep.refused(*command)
    assert "a.parquet: row 2: column 'x': 300 is not possible in uint8; --on-error skip" in err
    assert data_prep(*command, "--on-error", "skip", "--split", "column:k")[0] == 0
    assert problems() == [
        ("row 2", "column 'x': 300 is not possible in uint8"),
        ("row 3", "column 'x' is null; --null x=VALUE gives such rows a value"),
        ("row 4", "column 'x': -1 is not possible in uint8"),
        ("row 5", "column 'l' has a null inside"),
        ("row 6", "column 'l' is null; a list may be empty, but has to be there"),
    ]
    assert Path("OUT/problems.jsonl").read_text().count('"a.parquet"') == 5
    assert rows("OUT", "a")["x"].tolist() == [1]
    data_prep("table", "a.parquet", "FULL", "--columns", "x,k", "--null", "x=-7", "--null", "k=?")
    assert rows("FULL")["x"].tolist() == [1, 300, -7, -1, 5, 6]
    assert as_text(rows("FULL")["k"]) == ["a", "b", "a", "b", "?", "c"]
    data_prep("table", "a.parquet", "CODE", "--columns", "k", "--null", "k=?", "--categorical", "k")
    assert rows("CODE")["k"].tolist() == [1, 2, 1, 2, 0, 3]


def test_large_unsigned_integers_are_not_made_negative(data_prep):
    parquet.write_table(pa.table({"x": pa.array([1, 2**64 - 1], pa.uint64())}), "a.parquet")
    err = data_prep.refused("table", "a.parquet", "OUT")
    assert "row 2: column 'x': 18446744073709551615 is beyond int64" in err


@pytest.mark.parametrize(
    ("row", "text", "words"),
    [
        (700, "zz,1,w", "column 'n': invalid value 'zz' for int64, the type of the first rows;"),
        (900, "1.5,1,w", "column 'n': invalid value '1.5' for int64"),
        (901, "1,2", "Expected 3 columns, got 2: 1,2"),
        (902, "1,2,3,4", "Expected 3 columns, got 4: 1,2,3,4"),
        (1500, "1,?,w", "column 'x': invalid value '?' for double"),
        (1999, "1", "Expected 3 columns, got 1: 1"),
        (2000, "99999999999999999999,1,w", "column 'n': invalid value '99999999999999999999'"),
        (1200, ",1,w", "column 'n' is null; --null n=VALUE gives such rows a value"),
    ],
)
def test_csv_has_the_types_of_its_first_rows(data_prep, monkeypatch, row, text, words):
    """Later rows of another type or another length are named, in all blocks and pieces."""
    monkeypatch.setattr(csv_files, "BLOCK", 3000)
    lines = ["n,x,word", *(f"{i},{i}.5,w{i}" for i in range(2000))]
    lines[row] = text
    lines.insert(5, "")  # an empty line does not count as a row
    Path("a.csv").write_text("\n".join(lines))
    command = ["table", "a.csv", "OUT", "--workers", "1"]
    assert data_prep.refused(*command).startswith(f"data_prep: a.csv: row {row}: {words}")
    if "column 'x'" in words:  # also if it is not read at its place in the file
        err = data_prep.refused(*command, "--columns", "x", "--overwrite")
        assert err.startswith(f"data_prep: a.csv: row {row}: {words}")
    if "null" in words:
        assert data_prep(*command, "--on-error", "skip")[0] == 0
        assert problems() == [(f"row {row}", words)]
        assert rows()["n"].tolist() == [i for i in range(2000) if i != row - 1]


def test_csv_that_is_no_utf8_later(data_prep):
    content = "a,b\n" + "x,1\n" * 300_000
    Path("a.csv").write_bytes(content.encode() + b"\xff,1\nlast,2\n")
    command = ["table", "a.csv", "OUT", "--workers", "1"]
    assert "a.csv is not UTF-8: byte 1,200,004 is 0xff" in data_prep.refused(*command)
    assert not Path("OUT").exists()


def test_csv_with_quotes_is_not_cut(data_prep):
    lines = [f'"line {i}\nwith ""quotes"", and more",{i}' for i in range(500)]
    Path("a.csv").write_text('"a","b"\n' + "\n".join(lines) + "\n")
    assert data_prep("table", "a.csv", "OUT", "--shard-size", "2KB")[0] == 0
    found = rows("OUT")
    assert found["b"].tolist() == list(range(500))
    assert as_text(found["a"])[7] == 'line 7\nwith "quotes", and more'


def test_csv_dialects(data_prep, monkeypatch):
    Path("a.csv").write_text("1;x\n2;y\n")
    assert data_prep("table", "a.csv", "A", "--delimiter", ";", "--header", "n,s")[0] == 0
    assert rows("A")["n"].tolist() == [1, 2]
    assert as_text(rows("A")["s"]) == ["x", "y"]
    Path("b.csv").write_bytes(b"\xef\xbb\xbfn,zip\r\n1,007\r\n2,100\r\n")
    assert data_prep("table", "b.csv", "B", "--cast", "zip=text", "--cast", "n=float32")[0] == 0
    assert as_text(rows("B")["zip"]) == ["007", "100"]
    assert fields("B") == {"n": "float32", "zip": "uint8[*]"}
    Path("c.csv").write_text("x,y\n1,2\n3,\n,6\n")
    assert data_prep("table", "c.csv", "C", "--null", "x=-1", "--null", "y=0")[0] == 0
    assert rows("C")["x"].tolist() == [1, 3, -1]
    assert rows("C")["y"].tolist() == [2, 0, 6]
    many = "".join(f"{i}\n" for i in range(3000))
    Path("d.csv").write_text(many)
    assert data_prep("table", "d.csv", "D", "--header", "n", "--shard-size", "3KB")[0] == 0
    assert rows("D")["n"].tolist() == list(range(3000))
    Path("d.csv").write_text(many + "x\n")
    monkeypatch.setattr(csv_files, "BLOCK", 5000)
    err = data_prep("table", "d.csv", "E", "--header", "n", "--shard-size", "3KB")[2]
    assert "d.csv: row 3001: column 'n': invalid value 'x' for int64" in err


def test_categories_are_sorted_by_value(data_prep):
    Path("a.csv").write_text("n,w\n10,b\n2,ä\n10,a\n")
    Path("b.csv").write_text("n,w\n-1,z\n")
    assert data_prep("table", "a.csv", "b.csv", "OUT", "--categorical", "n,w")[0] == 0
    assert rows("OUT")["n"].tolist() == [2, 1, 2, 0]
    assert rows("OUT")["w"].tolist() == [1, 3, 0, 2]


def test_a_split_by_a_column_that_is_no_field(data_prep):
    Path("a.csv").write_text("x,part\n1,train\n2,val\n3,train\n")
    command = ["table", "a.csv", "OUT", "--columns", "x", "--split", "column:part"]
    assert data_prep(*command)[0] == 0
    assert fields("OUT") == {"x": "int64"}
    assert rows("OUT")["x"].tolist() == [1, 3]
    assert rows("OUT", "val")["x"].tolist() == [2]


def test_odd_names_of_columns(data_prep):
    Path("a.csv").write_text("sepal length (cm),n\n5.1,1\n")
    err = data_prep.refused("table", "a.csv", "OUT")
    assert "field 'sepal length (cm)': a name has letters" in err
    assert "--rename (table)" in err
    assert data_prep("table", "a.csv", "OUT", "--rename", "sepal length (cm)=length")[0] == 0
    assert fields("OUT") == {"length": "float64", "n": "int64"}


@pytest.fixture
def bad(here):
    table = pa.table({"x": [1, 2], "y": [1.5, 2.5]})
    parquet.write_table(table, "good.parquet")
    parquet.write_table(pa.table({"x": [1.0], "y": [1.5]}), "other.parquet")
    parquet.write_table(pa.table({"x": [1]}), "less.parquet")
    content = Path("good.parquet").read_bytes()
    Path("cut.parquet").write_bytes(content[:-20])
    Path("hole.parquet").write_bytes(content[:4] + b"\xff" * 60 + content[64:])
    struct = pa.array([{"a": ["b"]}], pa.struct([("a", pa.list_(pa.string()))]))
    parquet.write_table(pa.table({"s": struct, "x": [1]}), "struct.parquet")
    parquet.write_table(pa.table({"d": [Decimal("1.5")], "x": [1]}), "decimal.parquet")
    parquet.write_table(pa.table({"n": pa.nulls(2)}), "null.parquet")
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((3, 2, 2)))
    parquet.write_table(pa.table({"t": tensors}), "tensor.parquet")
    Path("good.csv").write_text("x,y\n1,a\n")
    Path("swapped.csv").write_text("y,x\na,1\n")
    Path("empty.csv").write_text("")
    Path("header.csv").write_text("x,y\n")
    Path("null.csv").write_text("x,y\n,1\n")
    Path("twice.csv").write_text("x,x\n1,2\n")
    Path("latin.csv").write_bytes(b"x\n\xff\n")
    Path("semi.csv").write_text("x;y\n1;2\n")
    Path("open.csv").write_text('x,y\n1,"a\n2,b\n')
    Path("cut.csv.gz").write_bytes(gzip.compress(b"x,y\n" + b"1,2\n" * 1000)[:-12])
    Path("text.csv.xz").write_text("x")
    Path("x.feather").write_text("x")
    (here / "void").mkdir()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nope.csv"], 3, "nope.csv cannot be read: No such file"),
        (["void"], 3, "void has no file named *.csv or"),
        (["text.csv.xz"], 2, "text.csv.xz: table reads *.csv, *.csv.gz"),
        (["cut.parquet"], 3, "cut.parquet cannot be read as Parquet"),
        (["hole.parquet"], 3, "hole.parquet cannot be read as Parquet"),
        (["x.feather"], 2, "x.feather: table reads *.csv, *.csv.gz, *.tsv, *.tsv.gz, *.parq"),
        (["struct.parquet"], 3, "the column 's' is struct<a: list<element: string>>, which no"),
        (["struct.parquet"], 3, "`flatten()` of pyarrow's tables"),
        (["decimal.parquet"], 3, "'d' is decimal128(2, 1): no field holds such numbers; `cast`"),
        (["tensor.parquet"], 3, "the column 't' is extension<arrow.fixed_shape_tensor"),
        (["null.parquet"], 3, "the column 'n' is null, which no field can hold"),
        (["good.parquet", "other.parquet"], 3, "'x' is int64 in good.parquet, double in other.p"),
        (["good.parquet", "less.parquet"], 3, "'y' is double in good.parquet, no such column in"),
        (["good.parquet", "good.csv"], 3, "good.parquet and good.csv are of different formats"),
        (["good.csv", "swapped.csv"], 3, "swapped.csv has the columns y, x; good.csv has x, y"),
        (["empty.csv"], 3, "empty.csv cannot be read as CSV: Empty CSV file"),
        (["header.csv"], 3, "column 'x' has no value in the first rows that have 2, as the"),
        (["null.csv"], 3, "null.csv: column 'x' has no value in the first rows that"),
        (["twice.csv"], 3, "twice.csv has more than one column 'x'"),
        (["latin.csv"], 3, "latin.csv is not UTF-8: byte "),
        (["semi.csv"], 2, "there is a column 'x;y'"),
        (["semi.csv"], 2, "is --delimiter right?"),
        (["open.csv"], 3, "open.csv has an odd number of quotes: one is not closed, and what fol"),
        (["cut.csv.gz"], 3, "cut.csv.gz cannot be read"),
        (["good.csv", "--delimiter", "ab"], 2, "--delimiter 'ab': it is one ASCII character"),
        (["good.csv", "--columns", "z"], 2, "--columns z: there is no such column; there are x, y"),
        (["good.csv", "--cast", "z=int8"], 2, "--cast z: there is no such column"),
        (["good.csv", "--cast", "x=int9"], 2, "--cast x=int9: the dtypes are uint8, uint16"),
        (["good.csv", "--cast", "x"], 2, "--cast 'x' is not NAME=VALUE"),
        (["good.parquet", "--cast", "x=text"], 2, "--cast …=text is for CSV"),
        (["good.csv", "--null", "x=z"], 2, "--null x=z: that is no int64"),
        (["good.csv", "--drop", "x,y"], 2, "--drop leaves no column"),
        (["good.csv", "--stack", "s=z*"], 2, "--stack s: no column is 'z*'"),
        (["good.csv", "--stack", "s=x,y"], 2, "--stack s: 'x' is int64, 'y' is uint8[*]; they"),
        (["good.csv", "--rename", "x=y"], 2, "'x' and 'y' would both be 'y'"),
        (["good.csv", "--rename", "z=y"], 2, "--rename z: there is no such column"),
        (["good.csv", "--rename", "x=mask"], 3, "a field cannot be named 'mask'"),
        (["good.parquet", "--categorical", "y"], 2, "--categorical y: it is double, not text or"),
        (["good.csv", "--split", "column:z"], 2, "table has no such column to go by; it has x, y"),
    ],
)
def test_bad_input(data_prep, bad, here, args, code, words):
    at = next((i for i, arg in enumerate(args) if arg.startswith("--")), len(args))
    err = data_prep.refused("table", *args[:at], "OUT", *args[at:], "--workers", "1", code=code)
    assert words in err
    assert not (here / "OUT" / "index.json").exists()


def test_parquet_that_says_utf8_and_is_not(data_prep):
    array = pa.array([b"good", b"\xff"]).view(pa.string())
    parquet.write_table(pa.table({"t": array}), "a.parquet")
    for more in ([], ["--categorical", "t"]):
        err = data_prep.refused("table", "a.parquet", "OUT", *more)
        assert "a.parquet cannot be read as Parquet: " in err
        assert "Invalid UTF8" in err


def test_more_columns_than_are_aligned(data_prep):
    """A shard of many small datasets is not padded, and is read like any other."""
    count = 1100  # more than hpctrain.data.shards.shard.MANY
    values = np.random.default_rng(0).integers(-100, 100, (7, count))
    table = pa.table({f"c{i}": values[:, i] / (1 + i % 2) for i in range(count)})
    table = table.append_column("text", pa.array([f"t{i}" for i in range(7)]))
    name = "a.csv"
    table.to_pandas().to_csv(name, index=False)
    assert data_prep("table", name, "OUT")[0] == 0
    assert Index.load(Path("OUT")).shards[0].bytes < 700 * count
    found = rows()
    for i in range(count):
        assert (found[f"c{i}"] == values[:, i] / (1 + i % 2)).all()
    assert found["text"][6].tobytes() == b"t6"
    assert data_prep("inspect", "OUT", "--verify")[0] == 0
