"""See `hpctrain.engine.job.verdict`."""

import sys

from hpctrain.engine.job.verdict import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
