"""Tasks: what a model is trained for."""

from hpctrain.engine.tasks.metric_updates import measuring
from hpctrain.engine.tasks.task import (
    SplitTask,
    Sums,
    Task,
    bind,
    checked,
    derived,
    on_device,
    on_part,
)
from hpctrain.tasks.batches import field
from hpctrain.tasks.classification import Classification
from hpctrain.tasks.language_model import LanguageModel
from hpctrain.tasks.multi_label import MultiLabel
from hpctrain.tasks.regression import Regression

__all__ = [
    "Classification",
    "LanguageModel",
    "MultiLabel",
    "Regression",
    "SplitTask",
    "Sums",
    "Task",
    "bind",
    "checked",
    "derived",
    "field",
    "measuring",
    "on_device",
    "on_part",
]
