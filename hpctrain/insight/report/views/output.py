"""The files of charts: a PNG picture, or an HTML page."""

from importlib.util import find_spec
from pathlib import Path

from hpctrain.base.files.disk import temporary
from hpctrain.errors import ConfigError, StorageError


def check(option: str, file: Path, ending: str = "") -> None:
    """Check that a file can be made, before runs are read; raise a ConfigError if not."""
    if ending and file.suffix.lower() != ending:
        raise ConfigError(f"{option} {file}: it must end in {ending}; `report --html` makes a page")
    if not file.resolve().parent.is_dir() or file.is_dir():
        raise ConfigError(f"{option} {file}: no file can be written there")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs the package matplotlib: pip install 'hpctrain[prep]'")


def write(file: Path, content: str | bytes) -> None:
    """Write a file, at once; raise a StorageError if that is impossible."""
    unfinished = temporary(file)
    try:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode())
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise StorageError(f"{file}: cannot be written ({error.strerror})") from error
