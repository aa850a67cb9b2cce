"""The line that a person types on a machine of their own to reach a port of a node.

The port is open on the node's loopback alone: a debugger asks nobody for a password, and other
nodes and the network of the site must not reach it.
"""

import os
import socket

from hpctrain.node.tools import LOGIN


def free_port() -> int:
    """Return a port of this node's loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def line(port: int) -> str:
    """Return the command that brings the port of this node to one's own machine."""
    through = os.environ.get(LOGIN, "")
    jump = f"-J {through} " if through else ""
    user = through.partition("@")[0]
    node = f"{user}@{socket.gethostname()}" if user else socket.gethostname()
    return f"ssh {jump}-L {port}:localhost:{port} {node}"
