"""What is known of a run before it is queued, without torch.

    conf/hardware ── hardware ── what a machine can do, for plan, MFU and cost
    advice, memory_fit ── what could be changed, and whether there is room: `plan`, `report`

A login node imports all of it. What is not known is left out, and never guessed.
"""
