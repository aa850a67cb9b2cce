"""The run directory: the name of a run, its frozen config, its code and its provenance."""
