"""The part of the provenance in the index that all commands have in common."""

from datetime import UTC, datetime
from platform import python_version
from typing import Any

import h5py
import numpy as np

import hpctrain


def made_by(command: str) -> dict[str, Any]:
    """Return the command line, the time, and the versions that the bytes depend on; JSON."""
    return {
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "hpctrain": hpctrain.__version__,
            "python": python_version(),
            "numpy": np.__version__,
            "h5py": h5py.version.version,
            "hdf5": h5py.version.hdf5_version,
        },
    }
