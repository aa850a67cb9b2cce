"""`python -m data_prep`; see `data_prep.cli`."""

import os
import sys

if __name__ == "__main__":
    # A process for each core does the work: BLAS's threads, which wait by spinning, would take up
    # to a tenth of it from them. It is read when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from data_prep.cli import main

    sys.exit(main())
