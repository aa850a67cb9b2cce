"""The state of a task that has one, such as what it counts, in the checkpoints of a training."""

from typing import Any

from hpctrain.engine.part import Part
from hpctrain.engine.tasks.task import Task, TaskState


class TaskPart(Part):
    """Keeps the state of a task."""

    name = "task"

    def __init__(self, task: Task) -> None:
        self._state = TaskState(task)

    def state_dict(self) -> Any:
        """Return the state of the task; {} without one."""
        return self._state.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` returned."""
        self._state.load_state_dict(state)
