"""Tasks: what a model is trained for."""

from hpctrain.tasks.classification import Classification
from hpctrain.tasks.language_model import LanguageModel
from hpctrain.tasks.task import SplitTask, Sums, Task, bind, derived, field, on_part

__all__ = [
    "Classification",
    "LanguageModel",
    "SplitTask",
    "Sums",
    "Task",
    "bind",
    "derived",
    "field",
    "on_part",
]
