"""The commands for existing runs: `python -m hpctrain status | logs | cancel | resume | gc`.

    runs/ ── select ── facts (run directories, one squeue, one sacct) ── state ── the commands

The commands read the run directories and ask Slurm. So they work on any login node, and after the
terminal that started the runs was closed. A training needs none of them.
"""
