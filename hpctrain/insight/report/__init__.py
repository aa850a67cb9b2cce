"""Accounts of runs: where their time, GPUs and energy went, and what sweeps and seeds say."""
