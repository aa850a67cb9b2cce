"""Damaged files of every kind: one clean error that names the file, the place and the cure."""

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from hpctrain.base import errors
from hpctrain.base.files.record import (
    Count,
    Finite,
    JobId,
    Record,
    Seconds,
    Time,
    decode,
    read,
    written,
)
from hpctrain.base.names.run_record import ListedRun, Progress, RunRecord
from hpctrain.config.frozen import dump
from hpctrain.config.schema import Config
from hpctrain.data.shards.index import Index
from hpctrain.errors import DamageError, DataError, HpctrainError
from hpctrain.runs.checkpoints import manifest
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.runs.code import trained_code
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.meta import Meta, Uploaded

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
        ('{"parts": [{"step": true}]}', "$.parts[0].step is true; it must be `int`"),
        ('{"parts": [{"weight": NaN}]}', "$.parts[0].weight is NaN; it must be `float` >= "),
        ('{"parts": [{"started": 1e300}]}', "$.parts[0].started is 1e+300; it must be `float` <= "),
        (
            '{"parts": [{"job_id": "--state=R"}]}',
            '$.parts[0].job_id is "--state=R"; it must be a job id',
        ),
        ('{"parts": [{"job_id": "1\\n"}]}', "$.parts[0].job_id is "),
        ('{"parts": [{"pid": 1}]}', "$.parts[0].pid is 1; it must be `int` >= 2"),
        ('{"parts": null}', "$.parts is null; it must be `array`"),
        ('{"metrics": {"a": "1"}}', "$.metrics[...] is `str`; it must be `float`"),
        ('{"why": "a\\u0000b"}', "it has the character NUL in a text"),
        ('{"why": "bad"}', "$: `why` may not be bad"),
        ('{"parts": [', "it is not valid JSON (Input data was truncated)"),
        ("[]", "$ is `array`; it must be `object`"),
        ('{"new": ' + "[" * 9_000, "it is nested too deeply"),
        ('{"new": ' + "9" * 11_000 + "}", "it has more than 10,000 bytes, the most of its kind"),
    ],
)
def test_what_stands_in_a_damaged_file(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "whole.json"
    file.write_text(text)
    with pytest.raises(DamageError) as caught:
        read(Whole, file)
    assert str(caught.value).startswith(f"{file} is damaged: {error}")
    assert "\n" not in str(caught.value)


def test_what_may_be_read(tmp_path: Path) -> None:
    file = tmp_path / "whole.json"
    file.write_text(
        '{"parts": [{"step": 3, "job_id": "12_3", "pid": 77}], "new": [[{}]],'
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


MODULES = {"version": 1, "digests": {"a.py": "0"}}
# Each kind of file with a version: its place, a key and a value of another type, and its reader.
KINDS: dict[str, tuple[str, Any, Callable[[Path], Any]]] = {
    "run.json": ("attempts", 7, RunRecord.of),
    "progress.json": ("metrics", 7, Progress.of),
    "modules.json": ("digests", 7, lambda run: trained_code._digests(RunDir(run))),
    "journal/meta.json": ("uid", 7, Meta.read),
    "journal/uploaded.json": ("uid", 7, Uploaded.read),
    "checkpoints/step-00000006/manifest.json": (
        "step",
        "x",
        lambda run: Manifest.read(run / "checkpoints" / "step-00000006"),
    ),
    "index.json": ("fields", 7, Index.load),
}
STRICT = ("checkpoints/step-00000006/manifest.json", "index.json")  # of this version only


@pytest.fixture
def old_files(tmp_path: Path) -> Path:
    """Files that 0.1.0 has written, of each kind."""
    corpus = Path(__file__).parent / "corpus" / "0.1.0"
    run = Path(shutil.copytree(corpus / "runs" / "digits-968707dd", tmp_path / "run"))
    shutil.copy(corpus / "digits" / "index.json", run)
    (run / "modules.json").write_text(json.dumps(MODULES))
    uploaded = {"uri": "sqlite:////x", "uid": "u", "experiment_id": "1", "run_id": "r", "offset": 0}
    (run / "journal" / "uploaded.json").write_text(json.dumps(uploaded))
    return run


def changed(file: Path, **keys: Any) -> None:
    """Write a file again with other keys; a manifest gets its digest anew."""
    content = json.loads(file.read_bytes()) | keys
    if file.name == "manifest.json":
        del content["digest"]
        text = json.dumps(content, indent=1).removesuffix("\n}")
        file.write_bytes(manifest._sealed(text.encode()))
    else:
        file.write_text(json.dumps(content))


@pytest.mark.parametrize("name", KINDS)
def test_files_of_older_and_newer_versions(
    old_files: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, wrong, read_it = KINDS[name]
    file, before = old_files / name, repr(read_it(old_files))
    changed(file, version=1)
    assert repr(read_it(old_files)) == before
    changed(file, quantum=1, flavour=[{}])
    assert repr(read_it(old_files)) == before
    changed(file, version=2)
    if name in STRICT:
        with pytest.raises((DamageError, DataError), match="found version 2, this hpctrain reads"):
            read_it(old_files)
        return
    assert repr(read_it(old_files)) == before
    assert not caplog.records
    changed(file, **{key: wrong})
    try:
        assert not read_it(old_files)  # files that help but are not needed
        told = caplog.text
    except HpctrainError as error:
        told = str(error)
    if name != "journal/uploaded.json":
        assert "is of a newer hpctrain (version 2; this one knows 1): $" in told


def test_what_is_written_has_its_version(tmp_path: Path) -> None:
    assert "version" not in json.loads(written({"host": Part(step=3)}))
    run = RunDir(tmp_path / "run-00000001")
    run.freeze(dump(Config()))
    assert json.loads((run.path / "run.json").read_bytes())["version"] == 1


def test_every_error_goes_from_one_process_to_another() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in filter(lambda kind: issubclass(kind, HpctrainError), kinds):
        parts = ("f", "it must be x", "$.a", "1") if kind is DamageError else ("f: why",)
        found = pickle.loads(pickle.dumps(kind(*parts)))
        assert (type(found), str(found)) == (kind, str(kind(*parts)))
        again = errors.about("KEY=1", found)
        assert (again.exit_code, str(again)) == (found.exit_code, f"KEY=1: {found}")
    found = DamageError("f", "x", "$.a", "1")
    assert str(found) == "f is damaged: $.a is 1; x"
    assert vars(pickle.loads(pickle.dumps(found))) == vars(found)


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
