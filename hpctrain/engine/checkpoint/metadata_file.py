"""The file `.metadata` of a checkpoint: a pickle of DCP, read without running code from it.

The checkpoint may be a stranger's, and its manifest, too: nothing in the file may run code, take
more memory than the file, or hold the process up.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hpctrain.base.errors import StorageError
from hpctrain.base.files.disk import open_regular
from hpctrain.runs.checkpoints.manifest import NAME, Manifest

METADATA = ".metadata"
_DCP = (
    *(classes.Metadata, classes.StorageMeta, classes.MetadataIndex, classes.ChunkStorageMetadata),
    *(classes.TensorStorageMetadata, classes.TensorProperties, classes.BytesStorageMetadata),
    *(classes._MEM_FORMAT_ENCODING, _StorageInfo),
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(made.__module__, made.__name__): made for made in _DCP},
    **{("torch", name): v for name, v in vars(torch).items() if isinstance(v, torch.dtype)},
    ("torch", "Size"): torch.Size,
}
_OBJECTS = {made for made in _DCP if made is not classes._MEM_FORMAT_ENCODING}
_ONCE = {tuple, list, dict, *_OBJECTS}
# The parts of a key. Whatever else were hashed could take for ever.
_KEY: dict[str, Any] = {"fqn": str, "offset": (torch.Size, type(None)), "index": (int, type(None))}
_LARGEST = 1 << 30  # bytes: a few million parts of tensors
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}

# What pickles of DCP's metadata consist of. Sets and copies of the top of the stack are not in it.
_OPCODES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE
    SHORT_BINUNICODE EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE
    TUPLE1 TUPLE2 TUPLE3 GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD BINPUT LONG_BINPUT MEMOIZE
    BINGET LONG_BINGET
"""
_CODES = {getattr(pickle, name)[0] for name in _OPCODES.split()}


def _refuse(_: Any) -> None:
    raise pickle.UnpicklingError("it has an opcode that is no part of DCP's metadata")


class Unpickler(pickle._Unpickler):
    """Makes only the objects that DCP's metadata consists of, in a time that grows with its size.

    A few bytes can make tuples within tuples that take years to hash or to print, in C code that no
    signal ends. So no container is used twice, and none is hashed. This is Python's own reader in
    Python, which takes twice as long as that in C; its methods take one opcode each.
    """

    memo: dict[int, Any]
    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def _load_get(self, number: int) -> None:
        if type(found := self.memo[number]) in _ONCE:
            raise pickle.UnpicklingError(f"it uses a {type(found).__name__} twice")
        self.stack.append(found)

    def _load_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            if type(key) is str:
                continue
            known = vars(key) if type(key) is classes.MetadataIndex else {"": key}
            if not all(isinstance(v, _KEY.get(name, ())) for name, v in known.items()):
                raise pickle.UnpicklingError(f"it has a {type(key).__name__} as a key")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _load_reduce(self) -> None:
        args, made = self.stack.pop(), self.stack[-1]
        flat = made is torch.Size or all(
            isinstance(each, (str, int, type))
            or (type(each) is tuple and {type(number) for number in each} <= {int})
            for each in args
        )
        if not flat or (isinstance(made, type) and made in _OBJECTS):
            raise pickle.UnpicklingError("it makes an object in another way than DCP")
        self.stack[-1] = made(*args)

    def _load_new(self) -> None:
        args, made = self.stack.pop(), self.stack[-1]
        if args or not isinstance(made, type) or made not in _OBJECTS:
            raise pickle.UnpicklingError("it makes an object in another way than DCP")
        self.stack[-1] = object.__new__(made)

    def _load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) not in _OBJECTS:
            raise pickle.UnpicklingError(
                f"it changes a {type(made).__name__}, which is no object of DCP"
            )
        getattr(made, "__setstate__", vars(made).update)(state)

    dispatch |= dict.fromkeys({*range(256)} - _CODES, _refuse)
    dispatch |= {
        pickle.BINGET[0]: lambda self: self._load_get(self.read(1)[0]),
        pickle.LONG_BINGET[0]: lambda self: self._load_get(int.from_bytes(self.read(4), "little")),
        pickle.SETITEM[0]: lambda self: self._load_items([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._load_items(self.pop_mark()),
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ[0]: _load_new,
        pickle.BUILD[0]: _load_build,
    }

    def find_class(self, module: str, name: str) -> Any:  # noqa: D102
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _LAYOUTS.get
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module.startswith("pathlib") and name == "PosixPath":
            return lambda *_: ""  # the folder where it was saved, which nobody needs
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is no part of DCP's metadata"
        )


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration of DCP, which Python 3.11.2 pickles by its name."""
    if kind is not classes._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it calls getattr, which is no part of DCP's metadata")
    return kind[name]


def read(checkpoint: Path) -> bytes:
    """Return the file of a checkpoint that says where its tensors are, if it is intact."""
    path = checkpoint / METADATA
    facts = Manifest.read(checkpoint).files.get(path.name, {"bytes": 0, "xxh3_128": ""})
    try:
        with open_regular(path, parts=0) as file:
            content = file.read(min(facts["bytes"], _LARGEST) + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) != facts["bytes"] or len(content) > _LARGEST:
        raise StorageError(f"{path}: not of the size in {NAME}, which may be {_LARGEST:,} bytes")
    if xxhash.xxh3_128_hexdigest(content) != facts["xxh3_128"]:
        raise StorageError(f"{path}: its content has changed")
    return content


def parse(content: bytes, checkpoint: Path) -> classes.Metadata:
    """Return what the file says; a StorageError if that is not the metadata of a checkpoint."""
    path = checkpoint / METADATA
    try:
        found = Unpickler(io.BytesIO(content)).load()
        if not isinstance(found, classes.Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        names = {part.relative_path for part in found.storage_data.values()}
        if outside := [name for name in names if Path(name).name != name]:
            raise pickle.UnpicklingError(f"it refers to {outside[0]}, outside of the checkpoint")
        return found
    except EOFError:
        raise StorageError(f"{path}: not the metadata of a checkpoint: it ends too early") from None
    except Exception as error:  # whatever a stream of random bytes leads to
        reason = f"{error}" if isinstance(error, pickle.UnpicklingError) else repr(error)
        raise StorageError(f"{path}: not the metadata of a checkpoint: {reason}") from error
