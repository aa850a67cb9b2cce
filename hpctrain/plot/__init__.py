"""Curves of runs: in the terminal, as a picture, as a page, and as a table of numbers."""
