"""The commands for trained runs: `evaluate`, `predict`, `generate`, `export` and `branch`."""
