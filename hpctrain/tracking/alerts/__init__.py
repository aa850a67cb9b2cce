"""Alerts: messages about a run to a webhook. Losing one costs nothing but a line in a log."""
