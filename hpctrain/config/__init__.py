"""Configs: the schema of their keys, and how they are composed, checked, named and frozen."""
