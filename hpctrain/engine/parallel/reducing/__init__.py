"""What is reduced over the ranks in a step, and how."""
