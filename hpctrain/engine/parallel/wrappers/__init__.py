"""The wrappers: one class for each way in which ranks share the work of a step."""
