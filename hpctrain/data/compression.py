"""How the values of a shard are compressed: HDF5's own filters, or none.

    codec    filter id      levels
    none                            contiguous: the loader maps it, and reads single samples
    gzip     1              1-9     every HDF5 library reads it; small, and slow
    lz4      32004                  the fastest to read; saves the least
    zstd     32015          1-22    small, and fast to read
    blosc2   32026          0-9     Zstandard by blocks that fit the cache

A chunk is whole samples, about `chunk_bytes` of them and at least one. It is read and decoded at
once, so samples that lie together should be wanted together: see `hpctrain.data.samplers.blocks`.

Numbers of more than one byte go through the shuffle filter first, first bytes before second
bytes, which nearly always helps. All but gzip need hdf5plugin, to write and for readers other than
ours: `import hdf5plugin` in Python, HDF5_PLUGIN_PATH for h5dump and MATLAB.

The same samples give the same bytes, by one version of the codecs.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from hpctrain.data.field import Field
from hpctrain.errors import ConfigError, DataError

LEVELS = {
    "none": None,
    "gzip": (range(1, 10), 4),
    "lz4": None,
    "zstd": (range(1, 23), 3),
    "blosc2": (range(10), 3),
}
"""Of each codec: those that it has, and the default."""
PLUGINS = ("lz4", "zstd", "blosc2")
CHUNK_BYTES = 2**20
MOST_BYTES = 2**31 - 2**20  # in a chunk: Blosc2's and LZ4's limit is a little more


@dataclass(frozen=True)
class Compression:
    """See the module.

    Attributes:
        codec: One of LEVELS.
        level: More is smaller and slower; None: the codec's default, if it has levels.
        chunk_bytes: Of samples in a chunk, about, before they are compressed.

    Raises:
        ConfigError: There is no such codec, level or chunk, or the library is missing.
    """

    codec: str = "none"
    level: int | None = None
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.codec not in LEVELS:
            raise ConfigError(f"codec {self.codec!r}: it is one of {', '.join(LEVELS)}")
        levels = LEVELS[self.codec]
        if levels is None and self.level is not None:
            raise ConfigError(f"codec {self.codec} has no levels; level {self.level} was given")
        if levels is not None:
            if self.level is None:
                object.__setattr__(self, "level", levels[1])
            elif self.level not in levels[0]:
                raise ConfigError(
                    f"codec {self.codec}: level {self.level}; it is {levels[0][0]} to "
                    f"{levels[0][-1]}"
                )
        if self.chunk_bytes < 1:
            raise ConfigError(f"chunks of {self.chunk_bytes} bytes: they have at least one")
        if self.codec in PLUGINS:
            _library(self.codec)

    def __str__(self) -> str:
        """`zstd (level 3)`."""
        return self.codec if self.level is None else f"{self.codec} (level {self.level})"

    def check(self, fields: Mapping[str, Field]) -> None:
        """See that the samples fit into chunks.

        Raises:
            DataError: One sample (one element of a variable-length one) is too large.
        """
        for name, field in fields.items():
            if self.codec != "none" and field.nbytes > MOST_BYTES:
                raise DataError(
                    f"field {name!r} has samples of {field.nbytes / 1e9:.1f} GB; a compressed "
                    f"chunk holds at most {MOST_BYTES / 1e9:.1f} GB. --codec none stores them "
                    "as they are"
                )

    def rows(self, row_bytes: int) -> int:
        """How many samples of so many bytes make a chunk."""
        return max(1, min(self.chunk_bytes, MOST_BYTES) // row_bytes)

    def filters(self, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Return what h5py's `create_dataset` takes, for a codec that is not none."""
        shuffle = dtype.itemsize > 1
        if self.codec == "gzip":
            return {"compression": "gzip", "compression_opts": self.level, "shuffle": shuffle}
        library = _library(self.codec)
        if self.codec == "lz4":
            return {"shuffle": shuffle, **library.LZ4()}
        if self.codec == "zstd":
            return {"shuffle": shuffle, **library.Zstd(clevel=self.level)}
        kind = library.Blosc2.SHUFFLE if shuffle else library.Blosc2.NOFILTER
        return dict(library.Blosc2(cname="zstd", clevel=self.level, filters=kind))


@contextmanager
def as_asked() -> Iterator[None]:
    """Keep BLOSC_NTHREADS and its like out of what is written: Blosc2 notes them in its frames."""
    kept = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("BLOSC")}
    try:
        yield
    finally:
        os.environ.update(kept)


def plugins() -> Any:
    """Return hdf5plugin, and see that HDF5 uses the codecs it brings.

    HDF5 may have found others before: netCDF4, once imported, sets HDF5_PLUGIN_PATH for this
    process and those it starts. What another build writes reads the same, and has other bytes.

    Raises:
        ImportError: It is not installed.
    """
    library = import_module("hdf5plugin")
    files = library.get_config().registered_filters
    others = tuple(
        name for name in PLUGINS if not files.get(name, "").startswith(library.PLUGIN_PATH)
    )
    if others:
        library.register(others, force=True)
    return library


def _library(codec: str) -> Any:
    try:
        return plugins()
    except ImportError:
        raise ConfigError(
            f"codec {codec} needs hdf5plugin, which is not installed: "
            "pip install 'hpctrain[codecs]' (gzip and none do without)"
        ) from None
