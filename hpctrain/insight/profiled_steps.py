"""`train.profile=10-15`: torch's profiler records these steps, for a viewer.

The trace is `profile/steps-10-15.rank0.json.gz` in the run directory. Perfetto and Chrome show it.
"""

import logging
from pathlib import Path

import torch

from hpctrain.data.shards.types import Batch
from hpctrain.engine.part import Part

log = logging.getLogger(__name__)


class ProfiledSteps(Part):
    """Records a range of steps of this rank, unless an attempt begins inside of it.

    `steps` are the first and the last one, from 2 on, as in `train.profile`.
    """

    def __init__(self, steps: str, folder: Path, rank: int) -> None:
        self._first, self._last = map(int, steps.split("-"))
        self._file = folder / f"steps-{steps}.rank{rank}.json.gz"
        self._profiler: torch.profiler.profile | None = None

    def after_step(self, step: int, batch: Batch) -> None:
        """Begin before the first step of the range, and write the trace after the last one."""
        if step == self._first - 1:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif step == self._last and self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiler.stop()
            try:
                self._file.parent.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(self._file))
            except (OSError, RuntimeError) as error:
                log.warning("%s: the profile is not written (%s)", self._file, error)
            else:
                log.info("profile of steps %d to %d: %s", self._first, self._last, self._file)
