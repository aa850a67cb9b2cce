"""The training loop and the objects that it calls; `hpctrain.job.building.build` builds them."""

from hpctrain.training.hooks import Hook, RunState

__all__ = ["Hook", "RunState"]
