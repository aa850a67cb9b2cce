"""Whether a device of the job does nothing: below a limit in every sample of a window."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping

_USE = re.compile(r"(gpu_\d+)_utilization_percentage")
_CORES = "cpu_utilization_percentage"


class Idle:
    """Finds devices that were idle for a whole window, also after they were busy.

    A device is idle in a sample below this use in percent; the window has at least 3 samples.
    """

    def __init__(self, percent: float, samples: int) -> None:
        self._percent, self._samples = percent, samples
        self._seen: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def restart(self) -> None:
        """Begin the window anew: the run starts up, so that its devices have no work yet."""
        self._seen.clear()

    def add(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the devices that have become idle with this sample, each once until it is busy.

        Without any GPU, the cores of the job are the device.
        """
        found = {name: _USE.fullmatch(name) for name in metrics}
        use = {match[1]: metrics[name] for name, match in found.items() if match}
        if not use and _CORES in metrics:
            use = {"the cores": metrics[_CORES]}
        idle = []
        for device, value in use.items():
            window = self._seen.setdefault(device, deque(maxlen=self._samples))
            window.append(value)
            if max(window) >= self._percent:
                self._told.discard(device)
            elif len(window) == self._samples and device not in self._told:
                self._told.add(device)
                idle.append(device)
        return idle
