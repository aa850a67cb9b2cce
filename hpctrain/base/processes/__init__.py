"""Processes of this machine: children, their marks, their causes of death."""
