"""`python -m hpctrain call FOLDER`: one rank of a function job calls its function."""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.base.errors import ConfigError
from hpctrain.base.secrets import mask
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.engine.job import compile_cache
from hpctrain.launch.functions.function_call import (
    Call,
    encode,
    read_results,
    result_file,
    write_result,
)

_LONGEST_WAIT_S = 600.0  # until rank 0 has started


def main(argv: list[str]) -> int:
    """Call the function and write its result; return the exit code."""
    if len(argv) != 1:
        raise ConfigError("call takes one argument: python -m hpctrain call FOLDER")
    folder = Path(os.path.realpath(argv[0]))
    ranks = RankInfo.from_env()
    found = read_results(folder, ranks.world_size)
    if len(found) == ranks.world_size and all("value" in content for _, content in found):
        return 0  # Slurm has requeued the job although all ranks were done
    result_file(folder, ranks.rank).unlink(missing_ok=True)
    os.environ |= {  # what `torch.distributed.init_process_group` reads
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "GROUP_RANK": str(ranks.node_rank),
        "GROUP_WORLD_SIZE": str(ranks.num_nodes),
        "MASTER_ADDR": ranks.master_addr,
        "MASTER_PORT": str(ranks.master_port),
    }
    if ranks.launcher == "slurm":  # submitit's local executor has named itself
        os.environ["SUBMITIT_EXECUTOR"] = "hpctrain"  # which `submitit.JobEnvironment()` reads
    compile_cache.use(folder, os.environ)
    try:
        call = Call.read(folder)
        importlib.import_module(call.module)
        with _signed_objects(folder, ranks):
            value = encode(call(), f"the result of {call.module}.{call.name}")
    except BaseException as error:
        text = mask("".join(_own_frames(error)))
        print(text, end="", file=sys.stderr)
        write_result(folder, ranks.rank, {"error": text})
        return 1
    write_result(folder, ranks.rank, {"value": value})
    return 0


@contextmanager
def _signed_objects(folder: Path, ranks: RankInfo) -> Iterator[None]:
    """Let the ranks sign what they send with torch, which unpickles it, also that of strangers."""
    if ranks.world_size == 1 or "torch.distributed" not in sys.modules:
        yield
        return
    from hpctrain.cluster.ranks import run_secret
    from hpctrain.engine.distributed import members

    own = run_secret.make(folder) if ranks.is_main else run_secret.wait_for(folder, _LONGEST_WAIT_S)
    with members.signed_objects(run_secret.sign(own, "call", *ranks.attempt_key)):
        yield


def _own_frames(error: BaseException) -> list[str]:
    """Return the lines of the traceback without the frames of hpctrain at its start."""
    frame, ours = error.__traceback__, (__name__, Call.__module__)
    while frame is not None and frame.tb_frame.f_globals.get("__name__") in ours:
        frame = frame.tb_next
    return traceback.format_exception(type(error), error, frame)
