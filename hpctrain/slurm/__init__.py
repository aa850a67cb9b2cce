"""A name of before: copies of slurm/train.sbatch call `hpctrain.slurm.steps`."""
