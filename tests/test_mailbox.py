"""Messages: what was put is there as a whole; damage and links are none."""

import os
from pathlib import Path

from hpctrain.base.files.mailbox import Message


class Note(Message, frozen=True):
    BOX = "notes/of*.json"
    text: str


def test_a_message_is_there_until_it_is_dropped(tmp_path: Path) -> None:
    assert Note.get(tmp_path, "1") is None
    Note("a").put(tmp_path, "1")
    Note("b").put(tmp_path, "2")
    assert [Note.get(tmp_path, name) for name in "12"] == [Note("a"), Note("b")]
    assert sorted(os.listdir(tmp_path / "notes")) == ["of1.json", "of2.json"]
    Note("c").put(tmp_path)
    for _ in range(2):
        Note.drop(tmp_path)
    assert Note.get(tmp_path) is None


def test_what_is_no_message(tmp_path: Path) -> None:
    Note("a").put(tmp_path)
    file = Note.path(tmp_path)
    for content in ("", "[]", '{"text": 1}', '{"text": "\\u0000"}'):
        file.write_text(content)
        assert Note.get(tmp_path) is None
    (tmp_path / "real").mkdir()
    file.rename(tmp_path / "real" / "of.json")
    file.parent.rmdir()
    file.parent.symlink_to("real")
    assert Note.get(tmp_path) is None
