"""Files of weights in a folder: what is in them, by their headers, and a digest of the content.

    runs/digits-3fa92c1b                  a run: its newest intact checkpoint
    …/checkpoints/step-00000200           a checkpoint of ours
    model.safetensors                     a file
    model.safetensors.index.json, …       a folder of Hugging Face

This module does not import torch: a login node looks at weights before a job is queued.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import LARGEST_JSON, open_regular, parse_json
from hpctrain.base.files.record import read_bytes
from hpctrain.data.places.placement import stamp
from hpctrain.runs.checkpoints import manifest
from hpctrain.runs.checkpoints.manifest import Manifest

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX = ".safetensors.index.json"
_ADAPTERS = "adapter_config.json"


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file, with its dtype as safetensors writes it, such as "BF16"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """Weights on a disk: a checkpoint, a file, or a folder of Hugging Face.

    `tensors` are those of safetensors files by name; None for a checkpoint of ours, whose metadata
    only torch reads.
    """

    path: Path
    tensors: Mapping[str, Stored] | None

    def digest(self) -> str:
        """Return a digest of the content: equal for copies of the same files.

        The digests of the files of a checkpoint stand in its manifest. Other files are read.
        """
        if self.tensors is None:
            files = Manifest.read(self.path).files
            parts = [f"{name} {files[name]['xxh3_128']}" for name in sorted(files)]
        else:
            paths = sorted({tensor.file for tensor in self.tensors.values()})
            parts = [f"{path.name} {_digest(path, stamp(str(path)))}" for path in paths]
        return "xxh3_128:" + xxhash.xxh3_128_hexdigest("\n".join(parts).encode())

    @property
    def nbytes(self) -> int:
        """The bytes that `digest` has to read."""
        files = {tensor.file for tensor in (self.tensors or {}).values()}
        return sum(path.stat().st_size for path in files)


def find_weights(path: Path) -> WeightFiles:
    """Return the weights in a checkpoint, a safetensors file or a folder of such files."""
    folder = path.parent if path.name.startswith("adapter_model") else path
    if (folder / _ADAPTERS).is_file():
        raise ConfigError(
            f"{path} has only adapters (LoRA), in the format of peft. Make whole weights of them: "
            "`python -m hpctrain export RUN OUT --merge` for a run, or "
            "PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload().save_pretrained(OUT)"
        )
    if path.is_file():
        if path.suffix == ".safetensors":
            return WeightFiles(path, _headers([path]))
        if path.name.endswith(_INDEX):
            return WeightFiles(path.parent, _indexed(path))
        raise ConfigError(f"{path}: {_no_weights([path])}")
    if (path / manifest.NAME).is_file():
        return WeightFiles(path, None)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder")
    indices, files = sorted(path.glob(f"*{_INDEX}")), sorted(path.glob("*.safetensors"))
    if len(indices) > 1:
        listed = ", ".join(each.name for each in indices)
        raise ConfigError(f"{path} has several models: name one of the files {listed}")
    if indices:
        return WeightFiles(path, _indexed(indices[0]))
    if not files:
        raise ConfigError(f"{path}: {_no_weights(sorted(path.iterdir()))}")
    return WeightFiles(path, _headers(files))


def _no_weights(files: Sequence[Path]) -> str:
    pickles = [file.name for file in files if file.suffix in _PICKLES]
    if pickles:
        # What Lightning and many scripts save has the weights inside, beside the optimizer's state.
        nested = "['state_dict']" if pickles[0].endswith(".ckpt") else ""
        return (
            f"{pickles[0]} is a pickle, which can run code when it is loaded; convert it once, "
            "where you trust it: weights = torch.load(FILE, map_location='cpu')"
            f"{nested}; safetensors.torch.save_file({{name: value.clone() for name, value in "
            "weights.items()}, OUT)"
        )
    return (
        "no weights; there must be a run directory, a checkpoint (manifest.json), a .safetensors "
        "file, or a folder with .safetensors files"
    )


def _indexed(index: Path) -> dict[str, Stored]:
    """Return the tensors of the files that an index of Hugging Face lists."""
    try:
        content = parse_json(read_bytes(index, 0, LARGEST_JSON)[0])
        places = {str(name): str(file) for name, file in content["weight_map"].items()}
    except FileNotFoundError as error:
        raise StorageError(f"{index}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise StorageError(f"{index}: damaged ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{index}: not an index of weights (it has no weight_map)") from error
    found: dict[str, dict[str, Stored]] = {}
    for name, file in places.items():
        if Path(file).name != file:
            raise StorageError(f"{index}: {file} of {name} is not a file in the same folder")
        if file not in found:
            found[file] = _headers([index.parent / file])
        if name not in found[file]:
            raise StorageError(f"{index}: {name} is not in {file}")
    return {name: found[file][name] for name, file in places.items()}


def _headers(files: Sequence[Path]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(file).items():
            if name in tensors:
                raise ConfigError(
                    f"{file.parent}: {tensors[name].file.name} and {file.name} both have {name}; "
                    "name one of the files"
                )
            tensors[name] = stored
    return tensors


def _header(path: Path) -> dict[str, Stored]:
    """Return the tensors that the header of a safetensors file lists."""
    try:
        open_regular(path, parts=0).close()  # a FIFO would be waited for
        with safe_open(path, "numpy") as file:
            names = file.keys()
            slices = [(name, file.get_slice(name)) for name in names]
            return {n: Stored(path, tuple(s.get_shape()), s.get_dtype()) for n, s in slices}
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
    except SafetensorError as error:
        raise StorageError(f"{path}: not a whole safetensors file ({error})") from error


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, stamp: object) -> str:
    """Return the digest of a file; the runs of a sweep share it."""
    try:
        return manifest.digest(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
