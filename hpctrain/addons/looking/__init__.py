"""What is asked of a user's model and task in the first two steps of a training."""
