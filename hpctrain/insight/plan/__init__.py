"""Before anything is queued: does it fit, in which layout, how long does it take, at what cost.

inspecting (the model) ── predicting (memory, time) ── ranking (layouts) ── answer ── printing
"""
