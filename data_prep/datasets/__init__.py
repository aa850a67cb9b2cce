"""Data sets of ours, read for the commands that look at one or write it again."""
