"""Damaged files of every kind: one clean error that names the file, the place and the cure."""

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from hpctrain.errors import DamageError
from hpctrain.record import Count, Finite, JobId, Record, Seconds, Time, decode, read
from hpctrain.run_record import ListedRun, RunRecord

Pid = Annotated[int, msgspec.Meta(ge=2)]


class Part(Record, frozen=True):
    started: Time = 0.0
    step: Count = 0
    took: Seconds = 0.0
    weight: Finite = 1.0
    job_id: JobId = ""
    pid: Pid | None = None


class Whole(Record, frozen=True):
    LARGEST = 10_000

    parts: tuple[Part, ...] = ()
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    why: str = ""

    @classmethod
    def upgraded(cls, content: dict[str, Any]) -> dict[str, Any]:
        return {**content, "parts": content["pieces"]} if "pieces" in content else content

    def __post_init__(self) -> None:
        if self.why == "bad":
            raise ValueError("`why` may not be bad")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '{"parts": [{}, {"started": "soon"}]}',
            '$.parts[1].started is "soon"; it must be `float`',
        ),
        ('{"parts": [{"step": 1e30}]}', "$.parts[0].step is 1e+30; it must be `int`"),
        ('{"parts": [{"step": -1}]}', "$.parts[0].step is -1; it must be `int` >= 0"),
        ('{"parts": [{"step": true}]}', "$.parts[0].step is true; it must be `int`"),
        ('{"parts": [{"weight": NaN}]}', "$.parts[0].weight is NaN; it must be `float` >= "),
        ('{"parts": [{"started": 1e300}]}', "$.parts[0].started is 1e+300; it must be `float` <= "),
        ('{"parts": [{"took": 1e400}]}', "$.parts[0].took is Infinity; it must be `float` <= "),
        (
            '{"parts": [{"job_id": "--state=R"}]}',
            '$.parts[0].job_id is "--state=R"; it must be a job id',
        ),
        ('{"parts": [{"job_id": "1\\n2"}]}', "$.parts[0].job_id is "),
        ('{"parts": [{"job_id": "1\\n"}]}', "$.parts[0].job_id is "),
        ('{"parts": [{"pid": 1}]}', "$.parts[0].pid is 1; it must be `int` >= 2"),
        ('{"parts": [{"pid": -1}]}', "$.parts[0].pid is -1; it must be `int` >= 2"),
        ('{"parts": null}', "$.parts is null; it must be `array`"),
        ('{"metrics": {"a": "1"}}', "$.metrics[...] is `str`; it must be `float`"),
        ('{"why": "a\\u0000b"}', "it has the character NUL in a text"),
        ('{"why": "bad"}', "$: `why` may not be bad"),
        ('{"parts": [', "it is not valid JSON (Input data was truncated)"),
        ("", "it is not valid JSON (Input data was truncated)"),
        ("[]", "$ is `array`; it must be `object`"),
        ('{"new": ' + "[" * 100_000, "it is nested too deeply"),
        ('{"new": ' + "9" * 11_000 + "}", "it has more than 10,000 bytes, the most of its kind"),
    ],
)
def test_what_stands_in_a_damaged_file(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "whole.json"
    file.write_text(text)
    largest = 0 if "999" in text else 2**20
    with pytest.raises(DamageError) as caught:
        read(Whole, file, largest=largest)
    assert str(caught.value).startswith(f"{file} is damaged: {error}")
    assert "\n" not in str(caught.value)


def test_what_may_be_read(tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    file.write_text(
        '{"pieces": [{"step": 3, "job_id": "12_3", "pid": 77}], "new": [[{}]],'
        ' "metrics": {"a": NaN, "b": -Infinity, "c": 1}, "why": "a\\\\u0000"}'
    )
    whole = read(Whole, file)
    assert (whole.parts, whole.why) == ((Part(step=3, job_id="12_3", pid=77),), "a\\u0000")
    assert math.isnan(whole.metrics["a"])
    assert whole.metrics["b"] == -math.inf
    # What a version before has written for bytes that are not Unicode.
    assert decode(Whole, b'{"why": "a\\udce9b"}', "").why == "a?b"
    with pytest.raises(DamageError, match="text that is not Unicode"):
        decode(Whole, b'{"why": "\xe9"}', "")
    assert read(dict[str, Any], file)["new"] == [[{}]]
    with pytest.raises(AttributeError):
        whole.why = "frozen"  # type: ignore[misc]
    assert decode(tuple[Part, ...], msgspec.json.encode(whole.parts), "") == whole.parts


def test_what_is_no_file_of_ours_is_damage_and_what_is_missing_is_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link").symlink_to("file")
    for name, why in (("fifo", "not a regular file"), (".", "not a reg"), ("link", "it is a link")):
        with pytest.raises(DamageError, match=why):
            read(Whole, tmp_path / name)
    for name in ("none", "file/inside"):
        with pytest.raises(FileNotFoundError):
            read(Whole, tmp_path / name)


def test_keys_of_a_newer_version_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text('{"uid": "x", "quantum": 1, "flavour": [{}]}')
        assert RunRecord.of(tmp_path / name).uid == "x"
    said = f"{tmp_path}/a/run.json: a newer hpctrain wrote it; left out: flavour, quantum"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_damaged_run_of_a_sweep_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = [{"run": "/a"}, {"run": "/b", "job": "--state=RUNNING"}, 7, {"run": "/c"}]
    (tmp_path / "sweep.json").write_text(json.dumps(listed))
    assert [each.run for each in ListedRun.of(tmp_path)] == ["/a", "/c"]
    first, second = (record.getMessage() for record in caplog.records)
    assert '$[1] is damaged: $.job is "--state=RUNNING"' in first
    assert "$[2] is damaged" in second
    (tmp_path / "sweep.json").write_text("7")
    with pytest.raises(DamageError):
        ListedRun.of(tmp_path)
