"""Life around the runs: `python -m hpctrain status | logs | cancel | gc`.

    runs/ ── select ── facts (run directories, one squeue, one sacct) ── state ── the commands

Everything is read from the run directories, so it works from any login node and after the
terminal that started the runs is gone.
"""
