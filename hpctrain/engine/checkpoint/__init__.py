"""Checkpoints: written, verified and loaded."""
