"""The part of the batch scripts by which ranks run the Python of an environment that travels."""

from pathlib import Path

TEXT = Path(__file__).with_suffix(".sh").read_text(encoding="utf-8")
"""The shell text; its head says what its arguments are."""
