"""Shards of other libraries: tar files and MDS."""
