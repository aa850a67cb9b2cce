"""What is known of a run now: its facts, its state and its log files."""
