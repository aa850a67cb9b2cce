"""Ranks: what the environment says (`slurm`, without torch) and the process group (`group`)."""
