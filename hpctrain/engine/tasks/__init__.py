"""What a task gives to the loop: losses, sums and metrics."""
