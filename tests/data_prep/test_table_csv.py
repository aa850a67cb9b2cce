"""CSV files that are not UTF-8; integers that a float would round."""

from pathlib import Path

import pyarrow as pa
import pytest

from data_prep.formats.tables import csv_files
from data_prep.formats.tables.columns import Column
from hpctrain.errors import ConfigError
from tests.data_prep.read_back import as_text, rows

LARGE = 2**53 + 1  # the first integer that float64 does not have
TEXT = "n,wört\n1,ä\n2,€\n"


pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("values", "more", "row"),
    [
        ([1.5, LARGE, LARGE - 1], [], 2),
        ([1.5, LARGE - 1, 1e300, "inf", -LARGE], [], 5),
        ([1.5, 1e300, 10**400], [], 3),
        (["1.0", *range(500), LARGE, 7], ["--cast", "x=int64"], 502),
    ],
)
def test_an_integer_that_a_float_would_round_is_never_rounded(
    data_prep, monkeypatch, values, more, row
):
    """A point makes it a column of floats, also if it is cast to integers later."""
    monkeypatch.setattr(csv_files, "BLOCK", 1000)
    Path("a.csv").write_text("\n".join(["x", *map(str, values)]))
    err = data_prep.refused("table", "a.csv", "OUT", *more)
    assert f"a.csv: row {row}: column 'x' is read as floats, which would round '" in err
    assert "--cast x=float64 allows that, --cast x=text keeps" in err
    assert data_prep("table", "a.csv", "ALL", "--cast", "x=float64")[0] == 0
    assert rows("ALL")["x"].tolist() == [float(str(value)) for value in values]
    assert data_prep("table", "a.csv", "TEXT", "--cast", "x=text")[0] == 0
    assert as_text(rows("TEXT")["x"]) == [str(value) for value in values]


def test_floats_that_are_large_are_no_integers(data_prep):
    values = [1.5, LARGE - 1, 1e300, 12345678901234567.5]
    Path("a.csv").write_text("\n".join(["x", *map(str, values)]))
    assert data_prep("table", "a.csv", "OUT")[0] == 0
    assert rows()["x"].tolist() == values


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
        (b"n,w\n1," + b"a" * 2**23, [], "a row has more than 4.2 MB of text, or a quote in it is"),
        (b'n,w\n"a,1\n', [], "column 'n' has no value in the first rows that have 2, as the"),
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


def test_a_stack_does_not_take_a_column_that_has_its_name(data_prep):
    Path("a.csv").write_text("x,p1,p2\n1,2,3\n")
    err = data_prep.refused("table", "a.csv", "OUT", "--stack", "x=p*", code=2)
    assert "'x' and 'p1' would both be 'x'" in err
