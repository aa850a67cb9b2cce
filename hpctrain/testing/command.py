"""`python -m hpctrain cluster up`: a real Slurm with several nodes on this machine.

The tool is slurm/dev-cluster and the folder beside it, which need nothing of this package.
"""

import sys
from importlib import import_module

from hpctrain.base.files.yaml_file import conf_dir

# Like the folder `conf`, `slurm` is beside the package in a checkout, and inside it in a wheel.
TOOL = conf_dir().parent / "slurm" / "dev-cluster"


def main(argv: list[str]) -> int:
    """Run one command of the tool in this process; return its exit code."""
    sys.path.insert(0, str(TOOL.parent))
    code: int = import_module("dev_cluster.cli").program(argv, "python -m hpctrain cluster")
    return code
