"""What the text of an error says of its cause, and what follows from it.

    another rank has died ── the rank that failed first tells why; this error is not recorded
    late rank, GPU fault ─── the job is requeued, and its preflight may exclude the node
    out of memory ────────── smaller micro-batches, now or in the next attempt

The first that matches counts. The texts are those that torch, NCCL, CUDA and ROCm print in public
logs; `tests/runs/test_causes.py` has them, with texts beside them that must mean nothing. An error
that matches none, such as an illegal memory access, is one of the program: it would come again.

Since NCCL 2.13 another rank's death is a ncclRemoteError; before, it was a ncclSystemError, which
torch then explains with "unexpected exit of a remote peer". Other system errors are the rank's own,
unless NCCL's last error is of a connection.
"""

import re
from typing import NamedTuple


class Cause(NamedTuple):
    """A kind of error, and the texts that tell it."""

    name: str
    texts: re.Pattern[str]


def _cause(name: str, *texts: str) -> Cause:
    return Cause(name, re.compile("|".join(texts), re.IGNORECASE))


ANOTHER_RANK = _cause(
    "another rank has died",
    r"Connection (was likely )?(closed|reset|refused)|Broken ?pipe",
    r"(remote|peer).* (closed|exited|disconnected)|unexpected exit of a remote peer",
    # A collective operation that has timed out is of a late rank.
    r"gloo/transport(?!.*Timed out)|NCCL communicator was aborted|ncclRemoteError",
    r"ChildFailedError|KeyboardInterrupt|SystemExit|DistNetworkError",
    r"rank \d+ (is gone|has given no sign of life|failed: )",
)
LATE_RANK = _cause(
    "late rank",
    r"^LateRankError: |gloo/transport.*Timed out",
    # What the observers say (`faults.observer`).
    r"^rank \d+ \([^)]*\) (hangs|has died) after step|^ranks? [^;]*: the node has given no sign",
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
OUT_OF_MEMORY = _cause(
    "out of memory",
    r"^(\w+\.)*OutOfMemoryError: |(CUDA|HIP) out of memory\. Tried",  # torch's, also in another
    r"(CUDA|HIP) (driver )?error: out of memory|(Cuda|HIP) failure (\d+ )?'out of memory'",
    r"Triton Error \[\w+\]: out of memory|hipErrorOutOfMemory",
    r"\b(cu|hip)(BLAS|DNN|FFT|SOLVER|SPARSE)\w*(?<!HOST)_ALLOC(ATION)?_FAILED",
)
# What follows is the code of a user's constructor, or torch's stack and its general advice.
_NO_MESSAGE = re.compile(
    r'\n(  File "|Exception raised from |Search for `|(CUDA|HIP) kernel errors might ).*', re.DOTALL
)
_CAUSES = ANOTHER_RANK, LATE_RANK, GPU_FAULT, OUT_OF_MEMORY
# No library of GPUs or networks raises these for the ranks: their text may be a user's own, or of a
# server of data or of MLflow.
_OF_THE_RANK_ITSELF = re.compile(
    r"(\w+\.)*((Config|Misfit|Data|Storage|Damage|Tracking|Refused|Offline)Error"
    r"|(Key|Index|Value|Type|Attribute|Name|Assertion|FileNotFound|Permission)Error): "
)


def cause_of(error: BaseException | str) -> Cause | None:
    """Return the cause of an error, or of its text, which begins with its class; None: its own."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    if _OF_THE_RANK_ITSELF.match(text):
        return None
    return next((each for each in _CAUSES if each.texts.search(text)), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU had no memory left: for torch, NCCL, cuBLAS, cuDNN or a kernel."""
    return cause_of(error) is OUT_OF_MEMORY


def one_line(error: str) -> str:
    """Return the message of an error in one line; NCCL's has several, of which the last counts."""
    return " ".join(_NO_MESSAGE.sub("", error).split())
