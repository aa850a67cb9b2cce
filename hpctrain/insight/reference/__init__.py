"""The reference: what `--help` says of commands, keys, choices and metrics."""
