"""What a tracker beside MLflow must have: a class to inherit from, which does nothing by itself."""

from collections.abc import Mapping
from pathlib import Path

from hpctrain.tracking.tracker import NullTracker


class OtherTracker(NullTracker):
    """Base class of a tracker beside MLflow. Override the methods of which it shall know.

        class Lines(OtherTracker):
            def log_metrics(self, metrics, step):
                print(step, *metrics.items())

    Rank 0 makes it once for each attempt, and calls it from the thread that trains: a method must
    return soon. If a method raises an exception, the run goes on without this tracker.

    Attributes:
        run_dir: The run directory; absolute.
        run_name: The name of the run in MLflow.
        uid: Our id of the run, which is the same in all attempts: 32 hexadecimal digits.
    """

    run_dir: Path
    run_name: str
    uid: str

    def rewind_to(self, step: int, logged: Mapping[str, int]) -> None:
        """Learn that the metrics go on at `step`, after a resume or a rollback.

        It is called before the first metric or image of an attempt, too.

        Args:
            step: The first step that will be logged.
            logged: For each metric that was logged at `step` or later before, the last such step.
        """
