"""What NVML has answered on real GPUs (`make gpu`) is read as it was then."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.insight.monitor.nvidia import Nvidia
from tests.gpu.nvml_answers import FOLDER, Player, readings, recorded
from tests.monitor.nvml import Nvml, NVMLError


def stand_in() -> dict[str, Any]:
    """Return a recording of the stand-in, so that recording and playing fit to each other."""
    module: Any = Nvml()
    module.NVMLError = NVMLError
    return recorded(module, "GPU-a")


@pytest.mark.parametrize("file", [None, *sorted(FOLDER.glob("*.json"))])
def test_a_recording_is_read_as_it_was(file: Path | None) -> None:
    found = json.loads(json.dumps(stand_in()) if file is None else file.read_text())
    library = Nvidia(Player(found["answers"]))
    now = readings(library, "gpu") | {"processes": None}
    assert now == found["readings"]
    if file is None:
        assert now["model"] == ["NVIDIA H100 80GB HBM3"]
        assert now["ecc"] == {"error": 3}
        assert now["nvlinks"] == [18]
