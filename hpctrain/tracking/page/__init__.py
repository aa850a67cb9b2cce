"""What people read on the page of a run in MLflow, beside its numbers."""
