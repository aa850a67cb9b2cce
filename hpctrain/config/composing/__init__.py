"""Composing: from the words of a command line to configs, by Hydra."""
