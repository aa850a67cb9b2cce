"""Copies on a node: the shards of its ranks, and Python as one file."""
