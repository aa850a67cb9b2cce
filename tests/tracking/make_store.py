"""Makes a store with experiments: `python -m tests.tracking.make_store FILE NAME...`.

It prints the ids of the experiments.
"""

import sys

from hpctrain.tracking.store import write_lock
from hpctrain.tracking.uploading.client import connect, experiment_id, import_mlflow

if __name__ == "__main__":
    uri = f"sqlite:///{sys.argv[1]}"
    import_mlflow()
    with write_lock(uri):
        client = connect(uri)
        print([experiment_id(client, uri, name) for name in sys.argv[2:]])
