"""The steps of a run, for any loop: what it keeps, what it logs, and its one reduction a step."""
