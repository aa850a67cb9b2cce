"""hpctrain: from a config to finished, trustworthy training runs on a SLURM cluster."""

__version__ = "0.1.0"
