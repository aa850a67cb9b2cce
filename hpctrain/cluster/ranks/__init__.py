"""Ranks: what the environment says of this process and its place, and how ranks meet; no torch."""
