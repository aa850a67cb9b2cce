"""A run's directory: its identity, its frozen config, its code and where it comes from."""
