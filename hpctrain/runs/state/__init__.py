"""What is known of a run now: its facts, its state, its log files and its first error."""
