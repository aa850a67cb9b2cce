"""Where the files of shards are read: in place, or in verified copies on this node."""
