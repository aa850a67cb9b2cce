"""Shards of other libraries: MDS."""
