"""The cluster: Slurm's scripts and queue, and who this rank is."""
