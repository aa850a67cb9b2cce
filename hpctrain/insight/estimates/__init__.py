"""What is known of a run before it is queued, without torch.

    conf/hardware ── hardware ── what a machine can do, for plan, MFU and cost
    advice, right_size ── what could be changed: `plan`, `report`, `status`

A login node imports all of it. What is not known is left out, and never guessed.
"""
