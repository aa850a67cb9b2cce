"""Comparisons of floats: the one that the tests make themselves, and a record of how near all came.

    within(differences, bound)     parity tests: the differences are relative
    torch.allclose, torch.testing.assert_close, numpy.testing.assert_allclose, pytest.approx

With the variable HPCTRAIN_MARGINS, a folder, each comparison that held is noted there, in the ranks
of `tests.ranks`, too. `python -m tests.margins` makes a table of it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

# float64 rounds at 1e-16, and the mistakes that were measured are above 1e-5:
# docs/reproducibility.md.
EXACT = 1e-9
_FOLDER = "HPCTRAIN_MARGINS"
_installed = False


def within(found: Iterable[float], bound: float) -> None:
    """Fail unless all numbers are below the bound."""
    worst = max(found)
    assert worst < bound, f"{worst:.3g} is not below {bound:.3g}"
    _note(worst / bound, f"{bound:.1g}")


def install() -> None:
    """Note from now on what the libraries' comparisons have measured, if that is asked for."""
    global _installed
    if _FOLDER not in os.environ or _installed:
        return
    _installed = True
    import numpy as np
    import pytest
    import torch

    torch.allclose = _noting(torch.allclose, _of_tensors, 1e-5, 1e-8)
    torch.testing.assert_close = _noting(torch.testing.assert_close, _of_tensors, 1.3e-6, 1e-5)
    np.testing.assert_allclose = _noting(np.testing.assert_allclose, _of_tensors, 1e-7, 0.0)
    scalar: Any = type(pytest.approx(1.0))
    equal = scalar.__eq__

    def __eq__(self: Any, actual: Any) -> bool:
        same: bool = equal(self, actual)
        if same and isinstance(actual, float) and isinstance(self.expected, float):
            tolerance = self.tolerance
            apart = abs(actual - self.expected)
            if apart == apart and 0 < tolerance < float("inf"):
                _note(apart / tolerance, f"approx {tolerance / (abs(self.expected) or 1):.1g}")
        return same

    scalar.__eq__ = __eq__


def _noting(compare: Any, ratio: Any, rtol: float, atol: float) -> Callable[..., Any]:
    @wraps(compare)
    def noting(found: Any, expected: Any, *args: Any, **kwargs: Any) -> Any:
        result = compare(found, expected, *args, **kwargs)
        if result is not False:
            given = dict(zip(("rtol", "atol"), args, strict=False)) | kwargs
            relative, absolute = given.get("rtol", rtol), given.get("atol", atol)
            if relative or absolute:
                for value, dtype in ratio(found, expected, relative, absolute):
                    _note(value, f"{relative:.1g}, {absolute:.1g} {dtype}")
        return result

    return noting


def _of_tensors(found: Any, expected: Any, rtol: float, atol: float) -> Iterable[tuple[float, str]]:
    """Yield the largest difference, as a part of what is allowed, and the dtype, of tensors."""
    import torch

    if isinstance(found, dict):
        for name, value in found.items():
            yield from _of_tensors(value, expected[name], rtol, atol)
        return
    if isinstance(found, list | tuple):
        for one, other in zip(found, expected, strict=True):
            yield from _of_tensors(one, other, rtol, atol)
        return
    a, b = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    if not a.numel() or not (a.is_floating_point() or a.is_complex()):
        return
    dtype = str(a.dtype).removeprefix("torch.")
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to("cpu", wide), b.to("cpu", wide)
    parts = (a - b).abs() / (atol + rtol * b.abs())
    yield float(parts[parts.isfinite()].max()) if parts.isfinite().any() else 0.0, dtype


def _note(ratio: float, bound: str) -> None:
    if folder := os.environ.get(_FOLDER):
        frame = sys._getframe(1)
        while frame.f_back and (
            frame.f_code.co_filename == __file__ or "site-packages" in frame.f_code.co_filename
        ):
            frame = frame.f_back
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        line = json.dumps({"test": test, "where": where, "bound": bound, "ratio": ratio})
        with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
            file.write(f"{line}\n")
