"""Translate the configs of other programs into overrides of ours.

A file per program says what each of its keys becomes here, or why it has no counterpart.
"""
