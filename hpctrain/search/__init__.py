"""Hyperparameter searches: workers that promote, heal and ask trials, without a coordinator."""
