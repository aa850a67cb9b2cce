"""What every index says of how it was made, whichever command wrote it."""

from datetime import UTC, datetime
from platform import python_version
from typing import Any

import h5py
import numpy as np

import hpctrain


def made_by(command: str) -> dict[str, Any]:
    """The command line, the time, and the versions of what has a say in the bytes; JSON."""
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
