"""The account of one run: read from its directory and from Slurm's accounting, never guessed."""
