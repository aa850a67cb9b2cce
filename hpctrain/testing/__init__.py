"""A real Slurm on this machine: the command `cluster`, and a fixture for anybody's tests."""
