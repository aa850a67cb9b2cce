"""The supervised training: the steps of a session, each an update of one model by one task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.engine.part import Part
from hpctrain.engine.steps.stepping import Outcome, Stepping
from hpctrain.engine.supervised.micro_batches import MicroBatches
from hpctrain.engine.supervised.schedule import Schedule
from hpctrain.engine.supervised.step import TrainStep
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


@dataclass
class Trainer:
    """Trains the model of a run with the steps of its session.

    `evaluations` are the feeds of the evaluation, by the names of their splits.
    """

    session: Stepping
    train_step: TrainStep
    schedule: Schedule
    loader: DevicePrefetcher
    micro_batches: MicroBatches | None = None
    evaluations: Mapping[str, DevicePrefetcher] = field(default_factory=dict)

    def fit(self) -> Outcome:
        """Train from the last checkpoint, or from step 0, to the end or a stop request.

        Raises what `Stepping.steps` raises.
        """
        with self.session.closing():
            for step, batch in self.session.steps():
                self.train_step(batch, self.schedule(step))
        assert self.session.outcome is not None
        return self.session.outcome
