"""What the training measures of itself: times of steps, memory, and where the seconds went."""
