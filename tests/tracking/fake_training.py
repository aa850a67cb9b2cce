"""A program that uses the tracker like rank 0 of a training, but does not train.

python -m tests.tracking.fake_training RUN_DIR URI OPTIONS_AS_JSON
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from hpctrain.tracking import samples
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.tracker import JournalTracker

sys.modules.pop("mlflow", None)  # the server of forks has imported it (tests/forkserver.py)
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
run_dir, uri, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

tracker = JournalTracker(
    run_dir,
    Meta(uri, "exp", run_dir.name, run_dir.name, options.get("parent")),
    upload=options.get("upload", True),
    drain=options.get("drain", 60.0),
)
tracker.start(params=options.get("params", {}), tags={"who": "test"})
if "rewind" in options:
    tracker.rewind(options["rewind"])
# The monitors of so many nodes, each of which writes one sample at every tenth step.
nodes = [f"n{number:02}" for number in range(options.get("nodes", 0))]
writers = [samples.SampleWriter(samples.folder(run_dir) / f"{node}.jsonl") for node in nodes]
for step in range(options["begin"], options["end"]):
    for writer in writers if step % 10 == 0 else []:
        writer.write(time.time(), metrics={f"gpu_{k}_power_usage_watts": step for k in range(4)})
    tracker.log_metrics({"loss": 1 / (step + 1), **options.get("metrics", {})}, step)
    if step == options.get("checkpoint"):
        tracker.sync()
        print("POSITION", tracker.position(), flush=True)
    time.sleep(options.get("sleep", 0))
if "mlflow" in sys.modules:
    sys.exit("the training process has imported mlflow")
if options.get("die"):
    tracker.sync()
    print("DYING", flush=True)
    time.sleep(options["die"])
    os.kill(os.getpid(), signal.SIGKILL)
tracker.finish("FINISHED", "all steps done")
print("FINISHED", flush=True)
