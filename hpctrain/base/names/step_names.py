"""What is kept of one step has a name such as `step-00000200`, so that names sort as steps do.

From step 100,000,000 on the names are longer, and only `of_steps` sorts them.
"""

from pathlib import Path


def step_name(step: int) -> str:
    """Return the name of the folder of a step, or of its file without the ending."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step that the name of a folder or file has."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def of_steps(folder: Path, ending: str = "") -> list[Path]:
    """Return what a folder has of steps, with an ending such as `.json`, in the order of steps."""
    found = []
    for path in folder.glob(f"step-*{ending}"):
        digits = path.name[len("step-") : len(path.name) - len(ending)]
        if digits.isascii() and digits.isdecimal() and step_name(int(digits)) + ending == path.name:
            found.append(path)
    return sorted(found, key=step_of)
