"""Sensors of a run: one process per node reads them, and writes them into the run directory."""
