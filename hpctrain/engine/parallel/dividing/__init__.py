"""How the ranks of a group divide the modules of a model: tp, cp, pp and ep."""
