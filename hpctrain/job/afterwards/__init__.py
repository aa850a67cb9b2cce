"""What the ranks of a job do with a trained model: evaluate it, predict with it."""
