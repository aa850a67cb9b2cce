"""What a hook of one's own inherits from, and what it is given."""

from hpctrain.addons.hooks import Hook, RunState

__all__ = ["Hook", "RunState"]
