"""Functions as jobs: `hpctrain.submit_function`, and submitit's own executor by its entry points.

    submit_function ── function ── function_call (its folder) ── sbatch or here ── call, each rank

A training needs none of it.
"""
