"""How a model is spread over the ranks.

    config, ranks ── Degrees ── Mesh ──┐
    model (a function) ────────────────┴─ parallelize ── ParallelModel ── TrainStep

`recipe.parallelize` applies everything in one order. The `ParallelModel` that it returns owns the
forward and backward passes, the reduction of gradients, their scaling and clipping. In a loop of
one's own, which calls the module and `backward` itself, `own_loop.spread` does the same.
"""
