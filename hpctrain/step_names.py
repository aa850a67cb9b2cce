"""What is kept of one step has a name such as `step-00000200`, so that names sort as steps do."""

from pathlib import Path

PATTERN = f"step-{'[0-9]' * 8}"  # for Path.glob


def step_name(step: int) -> str:
    """Return the name of the folder of a step, or of its file without the ending."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step that the name of a folder has."""
    return int(folder.name.removeprefix("step-"))
