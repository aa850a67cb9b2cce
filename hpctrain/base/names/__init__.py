"""Names that files of a run, metrics and steps have everywhere."""
