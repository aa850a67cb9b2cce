"""Calls of functions as files: which functions and values a job can have."""

import math
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpctrain.engine.job.call import main
from hpctrain.errors import ConfigError, StorageError
from hpctrain.launch.functions.function_call import Call, code_of, encode, read_results


def test_values_are_those_of_json() -> None:
    given = {"a": np.float32(0.5), "b": torch.ones(2), "c": np.bool_(True), "d": (1, Path("/x"))}
    found = encode(given | {"e": math.nan, 3: None}, "it")
    assert math.isnan(found.pop("e"))
    assert found == {"a": 0.5, "b": [1.0, 1.0], "c": True, "d": [1, "/x"], "3": None}


def add(a: int, b: int = 0) -> int:
    return a + b


def fail() -> None:
    raise ValueError("as asked")


def odd() -> object:
    return [object()]


def made() -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize(
    ("function", "argument", "words"),
    [
        (made(), 1, "made.<locals>.<lambda> is not at the top of its module"),
        (print.__call__, 1, "not a function that a job can import"),
        (3, 1, "3: not a function that a job can import"),
        (
            add,
            object(),
            r"argument 1 is no value of JSON \(builtins.object\); allowed are None, bool",
        ),
        (add, [{"x": {1}}], r"argument 1 is no value of JSON \(builtins.set\); allowed are"),
        (add, ["a s3cret!"], r"argument has the value of MY_TOKEN.* let the function read"),
        (add, ["https://me:p@ss@host/x"], "an argument holds a password or token, which would"),
    ],
)
def test_what_a_job_cannot_have_is_refused(
    function: Any, argument: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "a s3cret!")
    with pytest.raises(ConfigError, match=words):
        Call.of(function, (argument,), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, r"test_call\.add\(a: int, b: int = 0\) -> int: missing a required argument: 'a'"),
        ((1,), {"c": 3}, "unexpected keyword argument 'c'"),
        ((1, 2, 3), {}, "too many positional arguments"),
    ],
)
def test_arguments_that_the_function_does_not_take_are_refused(
    args: tuple[int, ...], kwargs: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Call.of(add, args, kwargs)


def test_a_function_of_the_program_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add, "__module__", "__main__")
    with pytest.raises(ConfigError, match=r"add is defined in the program .* into a module beside"):
        Call.of(add, (), {})


def test_a_rank_writes_its_result_or_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"HPCTRAIN_LAUNCHER": "single"})
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o777)
    (tmp_path / "results").mkdir()
    Call.of(add, (1,), {"b": 2}).write(tmp_path, "abc")
    assert code_of(tmp_path) == "abc"
    assert main([str(tmp_path)]) == 0
    ((rank, content),) = read_results(tmp_path, 2)
    assert (rank, content["value"]) == (0, 3)
    assert os.environ["WORLD_SIZE"] == "1"
    # Not where torch would keep the code that it compiles: somebody else could write there.
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/compile"
    Call.of(fail, (), {}).write(tmp_path, None)
    assert main([str(tmp_path)]) == 0  # a requeued job whose ranks were done runs nothing
    (tmp_path / "results" / "0.json").unlink()
    assert main([str(tmp_path)]) == 1
    ((_, content),) = read_results(tmp_path, 1)
    assert "as asked" in content["error"]
    assert "job/call.py" not in content["error"]  # only the user's frames
    assert content["error"] in capsys.readouterr().err
    Call.of(odd, (), {}).write(tmp_path, None)
    assert main([str(tmp_path)]) == 1
    ((_, content),) = read_results(tmp_path, 1)
    assert "the result of test_call.odd is no value of JSON (builtins.object)" in content["error"]


def received() -> str:
    """Unpickle what somebody else has sent, as torch's object collectives do."""
    content = torch.frombuffer(bytearray(pickle.dumps(Path("x"))), dtype=torch.uint8)
    return str(dist.distributed_c10d._tensor_to_object(content, len(content), None))


def test_ranks_of_a_function_do_not_unpickle_what_a_stranger_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_GLOBALID": "0"}
    ranks |= {"SUBMITIT_LOCAL_LOCALID": "0", "HPCTRAIN_LAUNCHER": "submitit-local"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # `main` changes it
    (tmp_path / "results").mkdir()
    Call.of(received, (), {}).write(tmp_path, None)
    assert main([str(tmp_path)]) == 1
    ((_, content),) = read_results(tmp_path, 2)
    assert "is not signed with the key of this process group" in content["error"]
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert received() == "x"  # the signatures end with the call


def test_a_damaged_call_is_named(tmp_path: Path) -> None:
    (tmp_path / "call.json").write_text('{"module": "os"}')
    with pytest.raises(StorageError, match=r"call\.json: cannot be read as a call"):
        Call.read(tmp_path)
