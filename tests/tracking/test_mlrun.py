"""Tests of the names that MLflow allows, and of which errors are worth another try."""

import posixpath
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import TrackingError
from hpctrain.tracking.store import clean_key
from hpctrain.tracking.uploading.client import nature


@pytest.mark.parametrize(
    ("key", "clean"),
    [
        ("loss", "loss"),
        ("val/acc top-1: x", "val/acc top-1: x"),
        ("acc@1", "acc_1"),
        ("/a//b/./c/", "a/b/c"),
        ("../x", "_../x"),
        ("", "_."),
        ("größe", "größe"),
        ("a\nb", "a_b"),
    ],
)
def test_keys_that_people_use(key: str, clean: str) -> None:
    assert clean_key(key) == clean


@given(st.text() | st.text(alphabet="./ab:@-", max_size=12) | st.text(min_size=240, max_size=300))
def test_every_key_becomes_one_that_mlflow_allows(key: str) -> None:
    clean = clean_key(key)
    # MLflow's own rules (mlflow.utils.validation).
    assert re.fullmatch(r"[/\w.\- :]*", clean)
    assert posixpath.normpath(clean) == clean
    assert clean != "."
    assert not clean.startswith(("..", "/"))
    assert len(clean) <= 250
    assert clean_key(clean) == clean


class FakeMlflowError(Exception):
    def __init__(self, error_code: str, message: str = "") -> None:
        super().__init__(message)
        self.error_code = error_code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(), "transient"),
        (TimeoutError("the lock"), "transient"),
        (FakeMlflowError("TEMPORARILY_UNAVAILABLE", "database is locked"), "transient"),
        (FakeMlflowError("BAD_REQUEST", "QueuePool limit of size 5 overflow 10"), "transient"),
        (FakeMlflowError("INTERNAL_ERROR", "Max retries exceeded"), "transient"),
        (FakeMlflowError("INVALID_PARAMETER_VALUE"), "rejected"),
        (
            FakeMlflowError("INVALID_PARAMETER_VALUE", "run 1 must be in the 'active' state."),
            "deleted",
        ),
        (FakeMlflowError("RESOURCE_DOES_NOT_EXIST"), "fatal"),
        (FakeMlflowError("UNAUTHENTICATED"), "fatal"),
        (FakeMlflowError("INTERNAL_ERROR", "Detected out-of-date database schema"), "fatal"),
        (PermissionError(), "fatal"),
        (TrackingError("deleted"), "fatal"),
        (KeyError("a fault of ours"), "fatal"),
    ],
)
def test_what_is_worth_another_try(error: Exception, expected: str) -> None:
    assert nature(error) == expected
