"""Sweeps: runs that are checked, frozen, submitted and shown together."""
