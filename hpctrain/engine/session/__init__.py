"""The session of a run: its steps, its parts, what it keeps and what it logs, for any loop."""
