"""The files of one run in an MLflow store."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hpctrain.tracking import server, store
from hpctrain.tracking.uploading.client import repository


class Artifacts:
    """Sends files to the place of a run, which the store names; a bad one is a TrackingError."""

    def __init__(self, uri: str, place: str) -> None:
        self._uri, self._place = uri, place
        if store.is_server(uri):
            server.check_place(uri, place)

    def send(self, file: Path, folder: str = "") -> None:
        """Send a file into a folder of the run, such as `images`; it replaces one of its name."""
        # MLflow's client would ask the store for the place again with each file.
        repository(self._uri, self._place).log_artifact(str(file), folder or None)

    def send_text(self, text: str, name: str) -> None:
        """Send a text as the file `name`, such as `logs/7.rank0.log`."""
        *folders, last = Path(name).parts
        with TemporaryDirectory() as folder:
            file = Path(folder, last)
            file.write_text(text, encoding="utf-8")
            self.send(file, "/".join(folders))
