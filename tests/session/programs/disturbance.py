"""Steps that files in the folder of the runs disturb, each once.

`SIGKILL-17-1` sends rank 1 this signal in step 17, and `NAN-5-0` spoils what rank 0 has read in
step 5. While there is `slow`, each step takes as many seconds more as it says.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import hpctrain


def steps(session: hpctrain.Session, data: Any = None, **options: Any) -> Iterator[tuple[int, Any]]:
    """Yield what the steps of the session yield."""
    folder = session.run_dir.parent
    for step, batch in session.steps(data, **options):
        with suppress(FileNotFoundError):
            time.sleep(float((folder / "slow").read_text()))
        for asked in folder.glob(f"*-{step}-{session.rank}"):
            name = asked.name.partition("-")[0]
            asked.rename(folder / f"{asked.name}.done")
            if name == "NAN":
                batch["image"] = batch["image"] * float("nan")
            else:
                os.kill(os.getpid(), getattr(signal, name))
        yield step, batch
