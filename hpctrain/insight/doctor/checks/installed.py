"""What is installed: Python, torch and its libraries, packages, and the code itself."""

import hashlib
import os
import platform
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from hpctrain.base.version import __version__
from hpctrain.insight.doctor.environment import installed_version
from hpctrain.insight.doctor.finding import Finding, bad, good
from hpctrain.runs.code.provenance import packages

_PACKAGES = ("torch", "mlflow", "h5py", "hydra-core", "submitit")
_CODE = Path(__file__).parents[3]


def versions() -> dict[str, str]:
    """Return what must be the same on every rank, without importing torch.

    The build of torch, such as `2.7.1+cu126`, names the version of CUDA and so of NCCL.
    """
    listed = packages().splitlines()
    return {
        "python": platform.python_version(),
        "hpctrain": __version__,
        **{name: installed_version(name) for name in _PACKAGES},
        "packages": hashlib.sha256("\n".join(listed[1:]).encode()).hexdigest()[:12],
        "code": _code_digest(),
        "system": platform.platform(),
    }


def _code_digest(folder: Path = _CODE) -> str:
    """Return a digest of the Python files of this package."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0")
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def checked() -> list[Finding]:
    """Say what is installed, and whether torch starts without being compiled again."""
    shown = {name: found for name, found in versions().items() if name != "system"}
    findings = [good("versions", ", ".join(f"{k} {v}" for k, v in shown.items()))]
    spec = find_spec("torch")  # which imports nothing
    if spec and spec.origin and not _keeps_bytecode(Path(spec.origin)):
        folder = Path(spec.origin).parent
        names = {"python": sys.executable, "folder": str(folder.parent)}
        found = f"none in {folder}, and none can be kept: each start takes a minute more"
        findings.append(bad("bytecode of torch", "warn", found, "bytecode of torch", **names))
    return findings


def _keeps_bytecode(source: Path) -> bool:
    """Return whether Python finds or leaves the bytecode of a source file beside it."""
    cached = Path(cache_from_source(source))
    may_write = os.access(next(folder for folder in cached.parents if folder.exists()), os.W_OK)
    return cached.exists() or (may_write and not sys.dont_write_bytecode)
