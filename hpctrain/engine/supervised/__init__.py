"""The supervised training loop; `hpctrain.engine.building.build` builds it."""
