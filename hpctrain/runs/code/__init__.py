"""The code of a run: its copy, its commits and the versions of its packages."""
