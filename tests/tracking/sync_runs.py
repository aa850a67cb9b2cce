"""Uploads the runs of its arguments: `python -m tests.tracking.sync_runs RUN_DIR...`"""

import sys

from hpctrain.commands.sync import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
