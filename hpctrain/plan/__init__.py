"""Before anything is queued: does it fit, in which layout, how long does it take, at what cost.

    model_facts ──┐
    activations ──┼── rank_memory ──┐
    memory ───────┘                 ├── estimate ── ranking ── printing
    hardware ── timing ─────────────┘

`memory` does not import torch, so that a login node can use it.
"""
