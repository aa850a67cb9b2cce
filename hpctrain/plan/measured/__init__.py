"""Predictions that rest on measured runs, and not on data sheets."""
