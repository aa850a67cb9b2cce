"""What Slurm is told and asked: batch scripts, arrays, sbatch and its options, the queue."""
