"""What is kept of one step has a name such as `step-00000200`, so that names sort as steps do."""

import re
from pathlib import Path

PATTERN = "step-????????"  # for Path.glob


def step_name(step: int) -> str:
    """Return the name of the folder of a step, or of its file without the ending."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step that the name of a folder has."""
    return int(folder.name.removeprefix("step-"))


def is_step_name(name: str) -> bool:
    """Return whether a folder with this name belongs to a step."""
    return re.fullmatch(r"step-\d{8}", name) is not None
