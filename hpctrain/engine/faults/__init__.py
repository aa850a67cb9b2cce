"""What stops a run from outside: signals and stop requests."""
