"""What the texts of errors mean. There is no GPU here: the texts are those of public logs."""

import pytest
import torch

from hpctrain.base.processes import frames
from hpctrain.base.processes.causes import (
    ANOTHER_RANK,
    CODE,
    CONFIG,
    DATA,
    FILE_SYSTEM,
    GPU_FAULT,
    GPU_MEMORY,
    HANG,
    HOST_MEMORY,
    LOST_MOUNT,
    NODE,
    NON_FINITE,
    PORT,
    PREEMPTED,
    QUOTA,
    RANK_KILLED,
    TIME_LIMIT,
    TRACKING,
    Cause,
    cause_of,
    is_out_of_memory,
    one_line,
    recorded,
)
from hpctrain.errors import DataError, DistributedError

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
            CODE,
        ),
        (SYSTEM + last("Call to bind failed : Cannot assign requested address"), CODE),
        (SYSTEM, CODE),
        (CUDA + last("Cuda failure 1 'invalid argument'"), CODE),  # NVIDIA/nccl issue 1410
        ("LateRankError: after step 9: rank 1 (n1) did not arrive at all_reduce", HANG),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:144] Timed out waiting 1000ms", HANG),
        ("rank 1 (n1, pid 7) hangs after step 9, for 31 s in the phase step: it is", HANG),
        ("ValueError: rank 1 (n1) hangs after step 9", CODE),
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
        ("AcceleratorError: CUDA error: device-side assert triggered" + ADVICE, CODE),
        # A user's own text.
        ("RuntimeError: unknown error in my task", CODE),
        ("ValueError: no label for 'the boy had fallen off the bus'", CODE),
        ("RuntimeError: no label for 'the GPU is lost, an unspecified launch failure'", CODE),
        ("KeyError: 'remote peer closed'", CODE),
        ("TrackingError: http://mlflow:5000: Connection refused", TRACKING),
        ("DataError: s3://bucket/a.h5: Connection reset by peer", DATA),
        ("KeyError: 'uncorrectable ECC error, unspecified launch failure, GPU is lost'", CODE),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", GPU_MEMORY),
        ("InductorError: OutOfMemoryError: CUDA out of memory. Tried to alloc", GPU_MEMORY),
        # nccl issues 1235 and 1283, Qwen3 issue 873, pytorch issue 20123, cuDNN 9's name.
        (CUDA + last("Cuda failure 2 'out of memory'"), GPU_MEMORY),
        (CUDA + last("Cuda failure 'out of memory'"), GPU_MEMORY),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
            "`cublasCreate(handle)`",
            GPU_MEMORY,
        ),
        (
            "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            GPU_MEMORY,
        ),
        ("AcceleratorError: CUDA error: out of memory" + ADVICE, GPU_MEMORY),
        ("RuntimeError: Triton Error [CUDA]: out of memory", GPU_MEMORY),
        # Not the memory of a GPU, or not for want of it.
        ("OutOfResources: out of resource: shared memory, Required: 131072", CODE),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", CODE),
        ("OperationalError: (sqlite3.OperationalError) out of memory", CODE),
        ("ValueError: the file says 'CUDA out of memory. Tried to allocate'", CODE),
        # sd-scripts issue 1790: the number of maps, not the memory, was used up.
        ("RuntimeError: unable to mmap 4096 bytes from file </torch_3>: Cannot allocate", CODE),
        # The host: nextflow issue 5932, HAFS issue 101, tusas issue 149, tranX issue 41, the older
        # kernel of deepspeech issue 48, mxfold2 issue 20, torch's handler of a worker's SIGBUS.
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step "
            "tasks have been OOM Killed.",
            HOST_MEMORY,
        ),
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in step 3495064.0 cgroup. Some of "
            "your processes may have been killed by the cgroup out-of-memory handler.",
            HOST_MEMORY,
        ),
        ("srun: error: nid001277: tasks 1-3: Out Of Memory", HOST_MEMORY),
        ("[2059991.4] Out of memory: Killed process 25315 (python3) total-vm:533", HOST_MEMORY),
        ("[3017506.7] Out of memory: Kill process 25635 (python) score 974 or", HOST_MEMORY),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't "
            "allocate memory: you tried to allocate 132426121216 bytes. Error code 12 (Cannot "
            "allocate memory)",
            HOST_MEMORY,
        ),
        (
            "ERROR: Unexpected bus error encountered in worker. This might be caused by "
            "insufficient shared memory (shm).",
            HOST_MEMORY,
        ),
        ("OSError: [Errno 12] Cannot allocate memory", HOST_MEMORY),
        ("MemoryError: Unable to allocate 3.00 GiB for an array", HOST_MEMORY),
        ("RuntimeError: oom_kill event in my simulation", CODE),
        # mmdetection issue 12069, HostG issue 7, transformers issue 9732, mmdetection issue 6461,
        # piper issue 311.
        ("OSError: [Errno 122] Disk quota exceeded: 'out/intermediate.ntw'", QUOTA),
        ("StorageError: /runs/a: cannot be written (Disk quota exceeded)", QUOTA),
        ("OSError: [Errno 28] No space left on device", FILE_SYSTEM),
        ("OSError: [Errno 116] Stale file handle", LOST_MOUNT),
        # What Python makes of the error of a Lustre client that its server has thrown out.
        ("BrokenPipeError: [Errno 108] Cannot send after transport endpoint shutdown", LOST_MOUNT),
        ("OSError: [Errno 5] Input/output error: '/app/naifu555'", LOST_MOUNT),
        ("OSError: [Errno 107] Transport endpoint is not connected", LOST_MOUNT),
        ("StorageError: /runs/a: cannot be written (Stale file handle)", LOST_MOUNT),
        (
            "DataError: shard /d/a.h5: 'x' cannot be read in samples 0 to 9: [Errno 5] Can't read "
            "data (file read failed: errno = 5, error message = 'Input/output error')",
            LOST_MOUNT,
        ),
        ("DataError: shard /d/a.h5: 'x' is damaged in samples 0 to 9: Input/output error", DATA),
        ("ValueError: a row says 'Stale file handle'", CODE),
        ("RuntimeError: (Input/output error)", CODE),
        ("StorageError: /runs/a: cannot be written (Read-only file system)", FILE_SYSTEM),
        ("ValueError: disk quota exceeded, said my server", CODE),
        ("OSError: [Errno 36] File name too long: 'aaaa'", CODE),
        # vllm issue 39015, torchtune issue 1025.
        (
            "DistNetworkError: The server socket has failed to listen on any local network "
            "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: in use",
            PORT,
        ),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
            "local network address. The server socket has failed to bind to [::]:29500 (errno: 98 "
            "- Address already in use).",
            PORT,
        ),
        ("PortTakenError: port 12028 on n1 is taken (Address already in use)", PORT),
        ("RuntimeError: the address is already in use by customer 98", CODE),
        # zetta_utils issue 671, canu issue 1067, GEMmaker pull request 242, tusas issue 149.
        (
            "slurmstepd: error: *** STEP 494583.0 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO "
            "TIME LIMIT ***",
            TIME_LIMIT,
        ),
        (
            "slurmstepd: error: *** JOB 32391783 ON cn119 CANCELLED AT 2021-06-18T13:05:36 DUE TO "
            "PREEMPTION ***",
            PREEMPTED,
        ),
        # The observers' own sentences.
        ("rank 1 (n2, pid 7) has died after step 4, in the phase step", RANK_KILLED),
        ("rank 1 (n2, pid 7) hangs after step 4, in the phase step", HANG),
        ("ranks 2, 3 (n2): the node has given no sign of life for 31 s", NODE),
        ("srun: error: Node failure on node2", NODE),  # of the development cluster
        ("slurmstepd: error: *** STEP 440575.0 ON n1 CANCELLED AT 2023-12-05T07:16:01 ***", CODE),
        ("srun: error: Unable to allocate resources: Requested time limit is invalid", CODE),
        ("KeyError: 'DUE TO TIME LIMIT'", CODE),
        # A class of ours says it, whatever its text is.
        ("DataError: s3://bucket: Connection reset, DUE TO TIME LIMIT, NCCL, unknown", DATA),
        ("ConfigError: out of memory: Killed process 3", CONFIG),
        ("NodeError: launch.preflight=quick: n1: GPU 0: ECC", NODE),
        ("HealthError: loss is not finite", NON_FINITE),
    ],
)
def test_the_cause_follows_from_the_text(text: str, cause: Cause) -> None:
    assert cause_of(text) is cause
    assert cause_of(one_line(text)) is cause
    assert recorded(cause.name, "") is cause
    if cause is GPU_FAULT:  # as it is recorded, and judged again
        assert cause_of(f"GPU fault on n1: {one_line(text)}") is cause


def test_an_exception_is_judged_by_its_class_and_text() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("I ran out of memory"))

    class Mine(DataError, KeyError):
        pass

    assert cause_of(Mine("out of memory: Killed process 3")) is DATA
    assert cause_of(UnicodeDecodeError("ascii", b"", 0, 1, "Connection reset")) is CODE


def test_a_broken_connection_of_the_users_own_is_no_death_of_another_rank() -> None:
    """A library's error has its own name in it, or comes out of torch."""

    def caught(error: BaseException) -> BaseException:
        with pytest.raises(type(error)) as found:
            raise error
        return found.value

    own = caught(RuntimeError("my server of labels: Connection reset by peer"))
    assert cause_of(own) is CODE
    assert frames.place(frames.of_error(own)).startswith(f"{__file__}:")
    assert frames.place(frames.of_error(own)).endswith(" in caught")
    gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    assert cause_of(caught(RuntimeError(gloo))) is ANOTHER_RANK
    assert cause_of(caught(DistributedError("rank 3 is gone (Broken pipe)"))) is ANOTHER_RANK
    with pytest.raises(RuntimeError) as in_torch:
        torch.ones(2) @ torch.ones(3)
    assert cause_of(in_torch.value) is CODE


def test_one_line_has_the_last_error_of_nccl_and_neither_advice_nor_stack() -> None:
    said = one_line(CUDA + last("Cuda failure 1 'invalid argument'\nException raised from f at g"))
    assert said.endswith(
        "Call to CUDA function failed. Last error: Cuda failure 1 'invalid argument'"
    )
    ecc = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert one_line(ecc + ADVICE) == ecc
