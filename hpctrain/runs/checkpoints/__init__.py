"""The files of a checkpoint: what is in them, and which weights fit to which; no torch."""
