import pytest

from hpctrain.data.pace import MEMORY, Pace

MS = 1e-3
PART = 8 * 2**20


def seen(pace, parts, waited_s, busy_s, nbytes=PART):
    for _ in range(parts):
        pace.saw(waited_s, busy_s, nbytes)
    return pace.of_memory


def test_nothing_seen_is_no_reason():
    assert not Pace().of_memory


@pytest.mark.parametrize(
    ("waited_s", "busy_s", "nbytes", "expected"),
    [
        (1 * MS, 0.1 * MS, PART, True),
        (1 * MS, 0.5 * MS, PART, False),  # it computes meanwhile
        (0.0, 0.1 * MS, PART, False),  # it never waits
        (PART / MEMORY * 0.9, 0.1 * MS, PART, True),
        (PART / MEMORY * 1.1, 0.1 * MS, PART, False),  # it waits for a disk
    ],
)
def test_who_waits_for_what(waited_s, busy_s, nbytes, expected):
    assert seen(Pace(), 5, waited_s, busy_s, nbytes) == expected


def test_a_consumer_that_waits_for_every_second_part():
    """As where two read: the one that is read meanwhile is there."""
    pace = Pace()
    for part in range(10):
        pace.saw(2 * MS * (part % 2), 0.1 * MS, PART)
    assert pace.of_memory


def test_the_first_batches_do_not_tell():
    """Shards are opened, and groups are small."""
    pace = Pace()
    assert not seen(pace, 3, 20 * MS, 0.01 * MS, PART // 8)
    assert seen(pace, 20, 1 * MS, 0.1 * MS)


def test_a_consumer_that_changes():
    pace = Pace()
    assert seen(pace, 20, 1 * MS, 0.1 * MS)
    assert not seen(pace, 1, 1 * MS, 50 * MS)
    assert not seen(pace, 4, 1 * MS, 0.1 * MS)  # one long step does not settle it
    assert seen(pace, 30, 1 * MS, 0.1 * MS)
