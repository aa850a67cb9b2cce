"""Measure the parts of a training by themselves: `python -m hpctrain bench`."""
