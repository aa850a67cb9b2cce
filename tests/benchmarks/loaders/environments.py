"""Makes an environment for each peer that also sees the packages of this one, such as torch."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import torch

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "hpctrain-peers")


def python_with(package: str) -> str:
    """Return a python that can import `package`, which is installed if necessary; "": this one."""
    if not package:
        return sys.executable
    folder = CACHE / package
    python, done = folder / "bin" / "python", folder / "installed"
    wanted = f"{sys.prefix} torch {torch.__version__} numpy {np.__version__}"
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=False)
        # addsitedir also reads the .pth files there, which name editable installs.
        sites = [path for path in sys.path if path.endswith("-packages")]
        lines = [f"import site; site.addsitedir({path!r})\n" for path in sites]
        pure = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        (pure / "zz-host.pth").write_text("".join(lines))  # searched after the peer's packages
        (folder / "constraints").write_text(
            f"torch=={torch.__version__}\nnumpy=={np.__version__}\n"
        )
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        pip += ["--disable-pip-version-check", "--constraint", str(folder / "constraints"), package]
        installed = subprocess.run(pip, capture_output=True, text=True, check=False)
        if installed.returncode:
            raise RuntimeError(f"pip install {package}: {installed.stderr.strip()[-300:]}")
        done.write_text(wanted)
    return str(python)
