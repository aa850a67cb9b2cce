"""TensorBoard: the metrics and images of a run as event files in its directory.

    tensorboard --logdir runs

The files are written by torch's SummaryWriter, https://docs.pytorch.org/docs/stable/tensorboard.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import expanded
from hpctrain.tracking.tracker import OtherTracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(OtherTracker):
    """Write event files for TensorBoard.

    Args:
        folder: The folder of the files. A relative one is inside the run directory.
        flush_s: Seconds after which what was logged is in the file.

    Raises:
        ConfigError: The package `tensorboard` is missing.
    """

    def __init__(self, folder: str = "tensorboard", flush_s: float = 10.0) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "it needs the package tensorboard: pip install 'hpctrain[tensorboard]'"
            )
        self._folder, self._flush_s = folder, flush_s
        self._params: dict[str, Any] = {}
        self._writer: SummaryWriter | None = None

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Keep the params, which are shown as a text."""
        self._params = dict(params)

    def rewind_to(self, step: int, logged: Mapping[str, int]) -> None:
        """Begin a new file, which hides what older files have from this step on."""
        from torch.utils.tensorboard import SummaryWriter

        self.finish()
        place = Path(expanded(self._folder, "folder"))
        folder = self.run_dir / place if not place.is_absolute() else place / self.run_dir.name
        self._writer = SummaryWriter(
            str(folder), purge_step=step, flush_secs=max(1, round(self._flush_s))
        )
        if self._params:
            rows = [f"| {key} | {value} |" for key, value in self._params.items()]
            text = "\n".join(["| key | value |", "| --- | --- |", *rows])
            self._writer.add_text("params", text, step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step."""
        assert self._writer is not None
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def log_image(self, key: str, image: Any, step: int) -> None:
        """Write an image; see `hpctrain.tracking.page.images`."""
        import numpy as np

        from hpctrain.tracking.page.images import picture

        assert self._writer is not None
        content = np.asarray(picture(key, image).convert("RGB"))
        self._writer.add_image(key, content, step, dataformats="HWC")

    def log_figure(self, key: str, figure: Any, step: int) -> None:
        """Write a figure of matplotlib as an image."""
        assert self._writer is not None
        self._writer.add_figure(key, figure, step, close=False)

    def sync(self) -> None:
        """Put what was logged into the file."""
        if self._writer is not None:
            self._writer.flush()

    def finish(self, *_: Any, **__: Any) -> None:
        """Close the file; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
