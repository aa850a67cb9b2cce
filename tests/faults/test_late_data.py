"""The log says where the first batch is made, if it does not come."""

import time
from collections.abc import Iterator

import pytest

from hpctrain.faults import late_data
from hpctrain.faults.late_data import told_if_late


def numbers(seconds: float) -> Iterator[int]:
    time.sleep(seconds)
    yield from range(3)


@pytest.mark.usefixtures("group_of_one")
def test_a_first_item_that_is_late_is_told_with_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(late_data, "_LATE_S", 0.1)
    assert [*told_if_late("the first batch", numbers(0.5))] == [0, 1, 2]
    (record,) = caplog.records
    assert "the first batch takes more than 0.1 s; it is at " in record.message
    assert "test_late_data.py:13 in numbers" in record.message
    assert [*told_if_late("the first batch", numbers(0))] == [0, 1, 2]
    assert [*told_if_late("the first batch", iter(()))] == []
    assert len(caplog.records) == 1
