"""What is known of a run before it is queued, without torch: from formulas, and from earlier runs.

    model's config, optimizer ── cautions ── the warnings of `-m` and `plan`
    conf/hardware ── hardware ── what a machine can do, for plan, MFU and cost
    advice, memory_fit ── what could be changed, and whether there is room: `plan`, `report`
    runs of the same model ── measured_run ── time_limit ── launch.time_min=auto

A login node imports all of it. What is not known is left out, and never guessed.
"""
