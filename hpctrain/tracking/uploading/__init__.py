"""Carry the journal of a run to MLflow: the uploader's process, and what it sends."""
