"""What has ended the ranks of a run: the one table of causes, and of the texts that tell them.

    an error of ours ──────────── its class says the cause; its text is not looked at
    an error of Python ────────── code, except for the memory and the errors of files
    any other error, a log line ─ the first cause whose texts match; code, if none does

`hpctrain.runs.state.verdict` says what follows from each. The texts are those that torch,
NCCL, CUDA, ROCm, Slurm and Linux print in public logs; `tests/runs/test_causes.py` has them, with
texts beside them that must mean nothing.

Since NCCL 2.13 another rank's death is a ncclRemoteError; before, it was a ncclSystemError, which
torch then explains with "unexpected exit of a remote peer". Other system errors are the rank's own,
unless NCCL's last error is of a connection.
"""

import re
from pathlib import Path
from typing import NamedTuple

from hpctrain.base.errors import HpctrainError
from hpctrain.base.processes import frames


class Cause(NamedTuple):
    """A kind of end, by the name that users see, and the texts that tell it; None: none does."""

    name: str
    texts: re.Pattern[str] | None = None

    def __str__(self) -> str:
        return self.name


def _cause(name: str, *texts: str) -> Cause:
    return Cause(name, re.compile("|".join(texts), re.IGNORECASE))


CODE = Cause("code")
CONFIG, DATA, NON_FINITE = Cause("config"), Cause("data"), Cause("non-finite")
TRACKING = Cause("tracking")
USER_STOP, IDLE = Cause("user stop"), Cause("idle")
ANOTHER_RANK = _cause(
    "another rank has died",
    r"Connection (was likely )?(closed|reset|refused)|Broken ?pipe",
    r"(remote|peer).* (closed|exited|disconnected)|unexpected exit of a remote peer",
    # A collective operation that has timed out is of a rank that hangs.
    r"gloo/transport(?!.*Timed out)|NCCL communicator was aborted|ncclRemoteError",
    r"ChildFailedError|KeyboardInterrupt|SystemExit|DistNetworkError",
    r"rank \d+ (is gone|has given no sign of life|failed: )",
)
# The sentences of these three are also those of the observers (`faults.observer`).
HANG = _cause("hang", r"gloo/transport.*Timed out|^rank \d+ \([^)]*\) hangs after step")
RANK_KILLED = _cause("rank killed", r"^rank \d+ \([^)]*\) has died after step")
NODE = _cause(
    "node",
    r"^(slurmstepd|srun)\S*: .*(DUE TO NODE FAILURE|error: Node failure on )",
    r"^ranks? [^;]*: the node has given no sign",
)
# Only after the words of a library: a user's own text may say the same. CUDA calls a GPU that has
# fallen off the bus (Xid 79) an unknown error.
GPU_FAULT = _cause(
    "GPU fault",
    r"((CUDA|HIP) (driver )?error: |(Cuda|HIP) failure (\d+ )?'|Triton Error \[\w+\]: "
    r"|cudaError\w+: )(uncorrectable (ECC|NVLink) error|unspecified launch failure|hardware stack "
    r"error|Invalid access of peer GPU memory over nvlink|GPU is lost|unknown error)",
    r"\bNVMLError_GpuIsLost: ",
)
# Only a library's code, or the words after the name of CUDA or HIP: a host's memory is not meant.
GPU_MEMORY = _cause(
    "memory of the GPU",
    r"^(\w+\.)*OutOfMemoryError: |(CUDA|HIP) out of memory\. Tried",  # torch's, also in another
    r"(CUDA|HIP) (driver )?error: out of memory|(Cuda|HIP) failure (\d+ )?'out of memory'",
    r"Triton Error \[\w+\]: out of memory|hipErrorOutOfMemory",
    r"\b(cu|hip)(BLAS|DNN|FFT|SOLVER|SPARSE)\w*(?<!HOST)_ALLOC(ATION)?_FAILED",
)
HOST_MEMORY = _cause(
    "memory of the host",
    r"^slurmstepd\S*: error: Detected \d+ oom[_-]kill event|^srun: error: .*task.*: Out Of Memory$",
    r"\bout of memory: Kill(ed)? process \d+",  # Linux, of a group and of the whole host
    r"DefaultCPUAllocator: (can't allocate|not enough) memory: |MemoryError: Unable to allocate ",
    r"^OSError: \[Errno 12\]|insufficient shared memory \(shm\)",
)
QUOTA = _cause("quota", r"^OSError: \[Errno 122\]|^StorageError: .*\(Disk quota exceeded\)")
FILE_SYSTEM = _cause("file system", r"^OSError: \[Errno (28|30)\]")  # it is full, or read-only
# EIO, and a Lustre, NFS or FUSE client that has lost its server: another node may have not.
LOST_MOUNT = _cause(
    "lost mount",
    r"^(OSError|BrokenPipeError): \[Errno (5|107|108|116|121)\]",  # Python calls 108 so
    r"^(Storage|Data)Error: .*[('](Input/output error|Stale file handle|Remote I/O error|Transport "
    r"endpoint is not connected|Cannot send after transport endpoint shutdown)[)']",
)
PORT = _cause(
    "port",
    r"server socket has failed to (listen|bind).*(EADDRINUSE|Address already in use)",
    r"^OSError: \[Errno 98\]",
)
TIME_LIMIT = _cause("time limit", r"^(slurmstepd|srun)\S*: .*DUE TO TIME LIMIT")
PREEMPTED = _cause("preempted", r"^(slurmstepd|srun)\S*: .*DUE TO PREEMPTION")
_TOLD = (
    *(TIME_LIMIT, PREEMPTED, NODE, HOST_MEMORY, QUOTA, FILE_SYSTEM, LOST_MOUNT, PORT),
    *(ANOTHER_RANK, HANG, RANK_KILLED, GPU_FAULT, GPU_MEMORY),
)
_ALL = *_TOLD, CODE, CONFIG, DATA, NON_FINITE, TRACKING, USER_STOP, IDLE
OF_SLURM = {
    "OUT_OF_MEMORY": HOST_MEMORY,
    "TIMEOUT": TIME_LIMIT,
    "DEADLINE": TIME_LIMIT,
    "PREEMPTED": PREEMPTED,
    "NODE_FAIL": NODE,
}
"""What a state of a job or a step says, as `sacct` shows it."""

# A class says its cause, without its text: that of an error of Python may be a user's own, or of a
# server of data. DistributedError is not here: it tells what torch has said.
_OF_CLASS = {
    f"{name}Error": cause
    for cause, names in (
        (CODE, "Key Index Value Type Attribute Name Assertion FileNotFound Permission"),
        (CONFIG, "Config Misfit NoGpu"),
        (FILE_SYSTEM, "Storage InUse Damage"),
        (TRACKING, "Tracking Refused"),
        *((DATA, "Data"), (NON_FINITE, "Health"), (HOST_MEMORY, "Memory")),
        *((HANG, "LateRank"), (PORT, "PortTaken"), (NODE, "Node")),
    )
    for name in names.split()
}
_CLASS = re.compile(r"(?:\w+\.)*(\w+)(?:: |$)")
# What follows is the code of a user's constructor, or torch's stack and its general advice.
_NO_MESSAGE = re.compile(
    r'\n(  File "|Exception raised from |Search for `|(CUDA|HIP) kernel errors might ).*', re.DOTALL
)
# A class of ours, with which a text begins, says its cause as well.
_OWN = re.compile(r"(Config|Misfit|NoGpu|Data|Tracking|Refused|Node|PortTaken|InUse)Error: ")
# Torch's own words; a user's server of data resets its connections, too.
_LIBRARY = re.compile(r"gloo/|NCCL|c10d|TCPStore", re.IGNORECASE)
_OURS = str(Path(__file__).parents[2])


def cause_of(error: BaseException | str) -> Cause:
    """Return the cause of an error, or of its text, which begins with its class."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    match = _CLASS.match(text)
    names = [match[1]] if match else []
    if not isinstance(error, str):
        names = [each.__name__ for each in type(error).__mro__]
    if {"StorageError", "DataError"} & {*names}:
        for each in (QUOTA, LOST_MOUNT):
            if each.texts and each.texts.search(text):
                return each
    if known := next((_OF_CLASS[name] for name in names if name in _OF_CLASS), None):
        return known
    found = next((each for each in _TOLD if each.texts and each.texts.search(text)), CODE)
    return CODE if found is ANOTHER_RANK and _is_of_user(error, text) else found


def recorded(name: str, text: str) -> Cause:
    """Return the cause that a record names; without a name, that of the text of its error."""
    return next((each for each in _ALL if each.name == name), None) or cause_of(text)


def _is_of_user(error: BaseException | str, text: str) -> bool:
    """Return whether a user's code has raised an error that tells of a broken connection."""
    if isinstance(error, str | HpctrainError | KeyboardInterrupt | SystemExit):
        return False
    raised = frames.own(frames.of_error(error)[-1:])
    of_user = raised and not raised[0].f_code.co_filename.startswith(_OURS)
    return bool(of_user) and not _LIBRARY.search(text)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU had no memory left: for torch, NCCL, cuBLAS, cuDNN or a kernel."""
    return cause_of(error) is GPU_MEMORY


def one_line(error: str) -> str:
    """Return the message of an error in one line; NCCL's has several, of which the last counts."""
    return " ".join(_NO_MESSAGE.sub("", error).split())


def named(cause: str, text: str) -> str:
    """Return a text with the name of its cause in front, unless it says that itself."""
    said = not text or cause in ("", CODE.name) or cause.lower() in text.lower() or _OWN.match(text)
    return text if said else f"{cause}: {text}"
