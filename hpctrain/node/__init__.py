"""The node of a run: a person's shell, debugger and notebook; copies of shards and environments."""
