"""Tracking: metrics go into a journal, and later from there into MLflow, exactly once.

Importing this package never imports mlflow.
"""
