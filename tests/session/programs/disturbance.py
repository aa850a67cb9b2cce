"""Send this process a signal in a step: `DISTURB=SIGKILL,17,1` does so to rank 1 in step 17."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import hpctrain


def steps(session: hpctrain.Session, data: Any = None, **options: Any) -> Iterator[tuple[int, Any]]:
    """Yield what the steps of the session yield."""
    name, at, rank = os.environ.get("DISTURB", "SIGTERM,-1,0").split(",")
    for step, batch in session.steps(data, **options):
        if (step, session.rank) == (int(at), int(rank)):
            os.kill(os.getpid(), getattr(signal, name))
        yield step, batch
