"""Sources: samples by index, from the shards of one split or from other sources."""
