"""Folders of shards with an index.json, as mosaicml-streaming and litdata write them.

FOLDER/index.json                one data set without splits
FOLDER/train/index.json, …       each folder is a split
"""

from pathlib import Path

from data_prep.libraries import library
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import check_name

INDEX = "index.json"
COLUMN = "folder"  # the name of the column that holds the names of the folders


def split_folders(folder: Path, library: str) -> dict[str, Path]:
    """Return the folders that have an index, by split; the split of `folder` itself is ""."""
    if (folder / INDEX).exists():
        return {"": folder}
    folders = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{INDEX}"))}
    if not folders:
        raise DataError(
            f"{folder} has no {INDEX}, and no folder in it has: {library} has not written it"
        )
    for name in folders:
        check_name(name, "split")
    return folders


def unpacked_zstd(content: bytes | memoryview, limit: int) -> bytes:
    """Return what zstd has compressed, at most `limit` bytes of it."""
    zstandard = library("zstandard", "zstd", error=ConfigError)
    try:
        found: bytes = zstandard.ZstdDecompressor().stream_reader(content).read(limit)
    except zstandard.ZstdError as error:
        raise ValueError(error) from None
    return found
