"""CSV files that are not UTF-8; integers that a float would round."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.formats.tables import csv_files
from data_prep.formats.tables.columns import Column
from hpctrain.errors import ConfigError
from tests.data_prep.read_back import as_text, problems, rows

LARGE = 2**53 + 1  # the first integer that float64 does not have
TEXT = "n,wört\n1,ä\n2,€\n"


pytestmark = pytest.mark.usefixtures("here")


def test_an_integer_that_a_float_would_round_is_never_rounded(data_prep):
    Path("a.csv").write_text(f"x\n1.5\n{LARGE}\n{LARGE - 1}\n1e300\ninf\n{-LARGE}\n{10**400}\n")
    err = data_prep.refused("table", "a.csv", "OUT")
    assert err.startswith("data_prep: a.csv: row 2: column 'x' is read as floats, which would ")
    assert f"round '{LARGE}'; --cast x=float64 allows that, --cast x=text keeps" in err
    assert data_prep("table", "a.csv", "OUT", "--on-error", "skip")[0] == 0
    assert rows()["x"].tolist() == [1.5, 2.0**53, 1e300, np.inf]
    assert [record for record, _ in problems()] == ["row 2", "row 6", "row 7"]
    assert data_prep("table", "a.csv", "ALL", "--cast", "x=float64")[0] == 0
    assert rows("ALL")["x"][1] == 2.0**53
    assert data_prep("table", "a.csv", "TEXT", "--cast", "x=text")[0] == 0
    assert as_text(rows("TEXT")["x"])[1] == str(LARGE)


def test_an_integer_column_with_a_point_keeps_its_integers(data_prep, monkeypatch):
    """The point makes it a column of floats, also if it is cast to integers later."""
    monkeypatch.setattr(csv_files, "BLOCK", 1000)
    lines = ["1.0", *map(str, range(500)), str(LARGE), "7"]
    Path("a.csv").write_text("x\n" + "\n".join(lines))
    command = ["table", "a.csv", "OUT", "--cast", "x=int64", "--on-error", "skip"]
    assert data_prep(*command)[0] == 0
    assert rows()["x"].tolist() == [1, *range(500), 7]
    assert [record for record, _ in problems()] == ["row 502"]


def test_a_null_value_that_would_be_rounded_is_refused():
    assert Column.of("x", pa.float64(), null=str(LARGE - 1)).null.as_py() == 2.0**53
    with pytest.raises(ConfigError, match=f"--null x={LARGE}: a double would round it"):
        Column.of("x", pa.float64(), null=str(LARGE))


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (TEXT.encode("cp1252"), [], "a.csv is not UTF-8: byte 3 is 0xf6; `iconv -f cp1252 -t"),
        (b"n,w\n1,\xe4\n", [], "a.csv is not UTF-8: byte 6 is 0xe4; "),
        (b"\xef\xbb\xbfn,w\n1,\xe4\n", [], "a.csv is not UTF-8: byte 9 is 0xe4; "),
        (TEXT.encode("utf-16"), [], "a.csv is not UTF-8: byte "),
        (b"n,w\n1,a\n".decode().encode("utf-16-le"), [], "a.csv is not UTF-8: byte 1 is 0x00"),
        (b"n,w\n1,a\0\n", ["--header", "x,y"], "a.csv is not UTF-8: byte 7 is 0x00"),
        (b"n,w\n1," + b"a" * 2**21, [], "a row has more than 1.0 MB of text, or a quote in it is"),
        (b'n,w\n"a,1\n', [], "column 'n' has no value: no row has 2 values, as the header has;"),
        (b"n\n1\n", ["--split", "column:z"], "a.csv: --split column:z: table has no such column"),
        (b"n\n1.5\n", ["--stratify", "n"], "a.csv: --stratify 'n': it is a field with one whole"),
    ],
)
def test_refusals(data_prep, here, content, more, words):
    Path("a.csv").write_bytes(content)
    code, _, err = data_prep("table", "a.csv", "OUT", *more)
    assert code in (2, 3)
    assert words in err
    assert err.count("\n") == 1
    assert not (here / "OUT").exists()


@pytest.mark.parametrize("late", [False, True])
def test_a_ragged_row_and_a_value_of_another_type(data_prep, late):
    good = "1,ä\n" * (300_000 if late else 2)
    count = good.count("\n")
    Path("a.csv").write_text("n,w\n" + good + "2,ü,3\n3,c\nx,d\n5,ä\n")
    skip = ["--on-error", "skip", "--workers", "1"]
    given = [] if late else ["--cast", "w=text", "--cast", "n=int64"]
    code, _, err = data_prep("table", "a.csv", "OUT", *given, *skip)
    assert (code, err) == (0, "")  # Arrow would print a traceback if its handler failed
    assert rows()["n"].tolist()[-3:] == [1, 3, 5]
    assert as_text(rows()["w"])[-2:] == ["c", "ä"]
    found = [(record, reason[:27]) for record, reason in problems()]
    assert found == [
        (f"row {count + 1}", "it has 3 values, not 2: '2,"),
        (f"row {count + 3}", "column 'n': 'x' is no int64"),
    ]


def test_a_sample_that_is_refused_later_has_the_number_of_its_row(data_prep):
    Path("a.csv").write_text("x,part\n1.5,a\nzz,b\n2.5,a\nnan,b\ninf,b\n4,c d\n")
    command = ["table", "a.csv", "OUT", "--cast", "x=float64", "--null", "x=0"]
    more = ["--nan", "refuse", "--split", "column:part", "--on-error", "skip", "--workers", "1"]
    assert data_prep(*command, *more)[0] == 0
    assert [record for record, _ in problems()] == ["row 2", "row 5", "row 6"]


@pytest.mark.parametrize(
    "more", [["--columns", "z"], ["--cast", "x=int9"], ["--null", "x=z"], ["--stack", "s=x,t"], []]
)
def test_each_refusal_names_the_file(data_prep, more):
    """Also the reasons that depend on the type of a column, as in struct.parquet."""
    table = pa.table({"x": [1], "t": ["a"]})
    parquet.write_table(table if more else pa.table({"x": [[["a"]]]}), "a.parquet")
    code, _, err = data_prep("table", "a.parquet", "OUT", *more)
    assert code in (2, 3)
    assert err.startswith("data_prep: a.parquet: ")


def test_a_stack_does_not_take_a_column_that_has_its_name(data_prep):
    Path("a.csv").write_text("x,p1,p2\n1,2,3\n")
    err = data_prep.refused("table", "a.csv", "OUT", "--stack", "x=p*", code=2)
    assert "'x' and 'p1' would both be 'x'" in err
