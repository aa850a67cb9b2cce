"""`python -m hpctrain shell`: a shell, a debugger or a notebook on the node of a run."""
