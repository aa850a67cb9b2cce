"""What the texts of errors mean. There is no GPU here: the texts are those of public logs."""

import pytest
import torch

from hpctrain.causes import (
    ANOTHER_RANK,
    GPU_FAULT,
    LATE_RANK,
    OUT_OF_MEMORY,
    Cause,
    cause_of,
    is_out_of_memory,
    one_line,
)

NCCL = "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
SYSTEM = (
    NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
    "error. "
)
CUDA = (
    NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed."
)
# torch's general advice below each error of CUDA, and the C++ stack.
ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def last(error: str) -> str:
    return f"\nLast error:\n{error}"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        # NVIDIA/nccl issues 2076, 1514 and 795: another rank has died.
        (
            NCCL + "remote process exited or there was a network error, NCCL version 2.21.5\n"
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely."
            + last(
                "socketProgressOpt: Call to recv from 172.1.2.3<33759> failed : Connection reset"
            ),
            ANOTHER_RANK,
        ),
        (
            NCCL
            + "internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed."
            + last("Net : Connection closed by remote peer user<50260>"),
            ANOTHER_RANK,
        ),
        (
            SYSTEM + last("Net : Call to recv from 10.200.84.247<58355> failed : Broken pipe"),
            ANOTHER_RANK,
        ),
        # NCCL before 2.13 has no other name for it (torch's NCCLUtils).
        (
            SYSTEM
            + "It can be also caused by unexpected exit of a remote peer, you can check NCCL "
            "warnings for failure reason and see if there is connection closure by a peer.",
            ANOTHER_RANK,
        ),
        # The rank's own: NVIDIA/nccl issue 290, DeepEP issue 143, returnn issue 1470.
        (
            SYSTEM
            + last(
                "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size "
                "9637888), error: No space left on device (28)"
            ),
            None,
        ),
        (SYSTEM + last("Call to ibv_create_cq failed with error Cannot allocate memory"), None),
        (SYSTEM + last("Call to bind failed : Cannot assign requested address"), None),
        (SYSTEM, None),
        (CUDA + last("Cuda failure 1 'invalid argument'"), None),  # NVIDIA/nccl issue 1410
        ("LateRankError: after step 9: rank 1 (n1) did not arrive at all_reduce", LATE_RANK),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:144] Timed out waiting 1000ms", LATE_RANK),
        ("rank 1 (n1, pid 7) hangs after step 9, for 31 s in the phase step: it is", LATE_RANK),
        ("rank 1 (n1, pid 7) has died after step 9, in the phase checkpoint", LATE_RANK),
        ("ranks 2, 3 (n1): the node has given no sign of life for 31 s", LATE_RANK),
        ("ValueError: rank 1 (n1) hangs after step 9", None),
        # jade-hpc-gpu issue 194, LlamaFactory issue 8871, scope issue 749, nccl issue 1935.
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered" + ADVICE, GPU_FAULT),
        ("AcceleratorError: CUDA error: unspecified launch failure" + ADVICE, GPU_FAULT),
        ("AcceleratorError: HIP error: unspecified launch failure", GPU_FAULT),
        (
            "AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink or a "
            "hardware error" + ADVICE,
            GPU_FAULT,
        ),
        (CUDA + last("Cuda failure 999 'unknown error'"), GPU_FAULT),
        (CUDA + last("Cuda failure 'uncorrectable ECC error encountered'"), GPU_FAULT),
        ("NVMLError_GpuIsLost: GPU is lost", GPU_FAULT),
        # Errors of the program, which come again.
        ("AcceleratorError: CUDA error: device-side assert triggered" + ADVICE, None),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered" + ADVICE, None),
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            None,
        ),
        # A user's own text.
        ("RuntimeError: unknown error in my task", None),
        ("ValueError: no label for 'the boy had fallen off the bus'", None),
        ("RuntimeError: no label for 'the GPU is lost, an unspecified launch failure'", None),
        ("KeyError: 'remote peer closed'", None),
        ("TrackingError: http://mlflow:5000: Connection refused", None),
        ("DataError: s3://bucket/a.h5: Connection reset by peer", None),
        ("KeyError: 'uncorrectable ECC error, unspecified launch failure, GPU is lost'", None),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", OUT_OF_MEMORY),
        ("InductorError: OutOfMemoryError: CUDA out of memory. Tried to alloc", OUT_OF_MEMORY),
        # nccl issues 1235 and 1283, Qwen3 issue 873, pytorch issue 20123, cuDNN 9's name.
        (CUDA + last("Cuda failure 2 'out of memory'"), OUT_OF_MEMORY),
        (CUDA + last("Cuda failure 'out of memory'"), OUT_OF_MEMORY),
        (CUDA + last("HIP failure 'out of memory'"), OUT_OF_MEMORY),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
            "`cublasCreate(handle)`",
            OUT_OF_MEMORY,
        ),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", OUT_OF_MEMORY),
        (
            "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            OUT_OF_MEMORY,
        ),
        ("RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling", OUT_OF_MEMORY),
        ("AcceleratorError: CUDA error: out of memory" + ADVICE, OUT_OF_MEMORY),
        ("RuntimeError: Triton Error [CUDA]: out of memory", OUT_OF_MEMORY),
        # Not the memory of a GPU, or not for want of it.
        ("OutOfResources: out of resource: shared memory, Required: 131072", None),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", None),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling", None),
        ("OperationalError: (sqlite3.OperationalError) out of memory", None),
        ("OSError: [Errno 12] Cannot allocate memory", None),
        ("MemoryError: Unable to allocate 3.00 GiB for an array", None),
    ],
)
def test_the_cause_follows_from_the_text(text: str, cause: Cause | None) -> None:
    assert cause_of(text) == cause
    assert cause_of(one_line(text)) == cause
    if cause is GPU_FAULT:  # as it is recorded, and judged again
        assert cause_of(f"GPU fault on n1: {one_line(text)}") is cause


def test_an_exception_is_judged_by_its_class_and_text() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("I ran out of memory"))


def test_one_line_has_the_last_error_of_nccl_and_neither_advice_nor_stack() -> None:
    said = one_line(CUDA + last("Cuda failure 1 'invalid argument'\nException raised from f at g"))
    assert said.endswith(
        "Call to CUDA function failed. Last error: Cuda failure 1 'invalid argument'"
    )
    ecc = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert one_line(ecc + ADVICE) == ecc
