"""Samplers, which say which sample is at a position: pure functions (see `order`)."""
