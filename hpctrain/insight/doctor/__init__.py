"""Checks of a cluster, of its nodes and of their links: `python -m hpctrain doctor`."""
