"""The files of one run in an MLflow store, at a place that was checked (`artifact_place`).

MLflow's client would ask the store for the place again with each file, and copy through any link.
"""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from hpctrain.disk import open_below
from hpctrain.tracking import artifact_place, store
from hpctrain.tracking.uploading.client import repository


class Artifacts:
    """Sends files to the place of a run, which the store names; a bad one is a TrackingError."""

    def __init__(self, uri: str, place: str) -> None:
        self._uri, self._place = uri, place
        if store.is_server(uri):
            artifact_place.check_of_server(uri, place)
        else:
            database = store.sqlite_path(uri)
            self._below = artifact_place.below(database, place)
            self._root = Path(os.path.realpath(artifact_place.root(database)))

    def send(self, file: Path, folder: str = "") -> None:
        """Send a file into a folder of the run, such as `images`; it replaces one of its name."""
        if store.is_server(self._uri):
            repository(self._uri, self._place).log_artifact(str(file), folder or None)
            return
        inside = self._below / folder / file.name
        target = self._root / inside
        target.parent.mkdir(parents=True, exist_ok=True)

        def opener(path: str, flags: int) -> int:
            return open_below(Path(path), flags | os.O_NONBLOCK, len(inside.parts))

        with file.open("rb") as content, open(target, "wb", opener=opener) as copy:
            shutil.copyfileobj(content, copy)

    def send_text(self, text: str, name: str) -> None:
        """Send a text as the file `name`, such as `logs/7.rank0.log`."""
        *folders, last = Path(name).parts
        with TemporaryDirectory() as folder:
            file = Path(folder, last)
            file.write_text(text, encoding="utf-8")
            self.send(file, "/".join(folders))
