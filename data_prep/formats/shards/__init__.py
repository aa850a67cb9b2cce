"""Shards of other libraries: tar files, MDS and litdata."""
