"""NVIDIA's own diagnostics, if the administrators have installed them: `dcgmi diag --run 1`.

Level 1 looks at the software, at permissions, and at memory that was retired; it puts no load on
the GPUs. It looks at all GPUs of the node, also at those of other jobs, so what it finds is a
warning: a fault of the job's own GPUs is found by NVML.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from hpctrain import forks
from hpctrain.doctor.finding import Finding, good, unknown

_CHECK, _TIMEOUT_S = "DCGM", 90


def checked(*, run: bool) -> Finding:
    """Ask DCGM; with `run` it runs its diagnostics, which takes seconds."""
    program = shutil.which("dcgmi")
    if program is None:
        return unknown(_CHECK, "no dcgmi on the PATH: NVIDIA's diagnostics were not run")
    if not run:
        return unknown(_CHECK, "its diagnostics take seconds: `doctor --nodes` runs them")
    try:
        done = forks.run([program, "diag", "--run", "1", "--json"], text=True, timeout=_TIMEOUT_S)
        said = done.stdout
        answer = json.loads(said[said.index("{") : said.rindex("}") + 1])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = " ".join((done.stdout + done.stderr).split()) if "done" in locals() else str(error)
        return unknown(_CHECK, f"dcgmi gives no answer ({said[:200]})", "Is nv-hostengine running?")
    results = [*_results(answer)]
    failed = [f"{name}: {said}" for name, status, said in results if status == "fail"]
    if failed:
        cure = "Ask the administrators to run `dcgmi diag --run 3` on this node."
        return Finding(_CHECK, "warn", "; ".join(failed)[:300], "no failure", cure)
    if not results:
        return unknown(_CHECK, "the answer of dcgmi has no results")
    return good(_CHECK, f"{sum(each[1] == 'pass' for each in results)} results passed")


def _results(node: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield test, status and text of each result; versions of DCGM nest them differently."""
    if isinstance(node, list):
        for each in node:
            yield from _results(each, name)
    elif isinstance(node, dict):
        name = str(node.get("name", name))
        if "status" in node and name:
            where = node.get("gpu_ids", node.get("gpu_id", node.get("entity_id", "")))
            texts = node.get("warnings") or node.get("info") or ""
            yield name, str(node["status"]).lower(), f"GPU {where} {_words(texts)}".strip()
        for key, value in node.items():
            if key not in ("warnings", "info", "test_summary"):
                yield from _results(value, name)


def _words(texts: Any) -> str:
    if isinstance(texts, list):
        return " ".join(_words(each) for each in texts)
    if isinstance(texts, dict):
        return str(texts.get("warning", texts))
    return str(texts)
