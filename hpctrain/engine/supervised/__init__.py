"""The supervised training loop; `hpctrain.engine.loop` builds it."""
