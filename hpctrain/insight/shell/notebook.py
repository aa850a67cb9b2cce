"""A rank of one, in a notebook: `python -m hpctrain.insight.shell.notebook` in a step of one task.

A notebook's `with hpctrain.session(...)` is that rank, and has a process group of one.
"""

import os
import socket
import sys

from hpctrain.base.errors import HpctrainError
from hpctrain.insight.shell.tools import require, tunnel


def main() -> None:
    """Print the line of the tunnel, and become the server of notebooks."""
    try:
        module = require("notebook")
    except HpctrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    with socket.socket() as probe:  # a port that nobody uses now
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(f"On your own machine:\n    {tunnel(port)}", flush=True)
    print("then open the address with the token that follows.", flush=True)
    options = ("--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0")
    os.execv(sys.executable, [sys.executable, "-m", module, *options])


if __name__ == "__main__":
    main()
