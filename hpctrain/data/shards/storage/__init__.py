"""From the bytes of shards to rows: mapped, or decoded in threads."""
