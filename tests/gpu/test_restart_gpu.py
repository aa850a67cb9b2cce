"""A second start finds the code that the first one has compiled, and computes the same."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import run_module, runs
from tests.gpu.device import DEVICE, on_device
from tests.gpu.test_gpu import losses

pytestmark = on_device
KEYS = (
    *("experiment=digits", f"parallel.device={DEVICE.type}", "train.compile=model"),
    *("train.max_steps=5", "train.log_every=1", "tracking.upload=false"),
)


def test_a_second_start_compiles_nothing_anew(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    found, made = [], []
    for start in ("first", "second"):
        begun, folder = time.monotonic(), tmp_path / start
        run_module("hpctrain", *KEYS, f"data.path={digits}", f"output_dir={folder}", new=True)
        record_property(f"{start} start, seconds", time.monotonic() - begun)
        (run,) = runs(folder)
        found.append(losses(run))
        made.append({path for path in cache.rglob("*") if path.suffix in (".py", ".cubin", ".so")})
    assert found[0] == found[1] != {}
    assert made[0] == made[1] != set()
