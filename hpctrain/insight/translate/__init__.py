"""Translate the configs of other programs into a config of ours."""
