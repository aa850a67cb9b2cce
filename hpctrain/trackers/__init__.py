"""Trackers beside MLflow: `tracking.also=[{_target_: hpctrain.trackers.TensorBoard}]`."""

from hpctrain.trackers.tensor_board import TensorBoard
from hpctrain.trackers.webhook import Webhook
from hpctrain.trackers.weights_and_biases import WeightsAndBiases
from hpctrain.tracking.tracker import OtherTracker

__all__ = ["OtherTracker", "TensorBoard", "Webhook", "WeightsAndBiases"]
