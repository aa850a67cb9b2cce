"""`python -m data_prep`; see `data_prep.cli`."""

import os
import signal
import sys

if __name__ == "__main__":
    # A shell script starts `command &` with SIGINT ignored, and Python then installs no handler.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # There is one worker process per core. The threads of BLAS spin while they wait, which would
    # take up to a tenth of the processor time. numpy reads the variable when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from data_prep.cli import main
    from hpctrain.base.terminal.terminal import guard

    guard()
    sys.exit(main())
