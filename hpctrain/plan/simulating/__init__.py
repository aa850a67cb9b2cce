"""One rank of a large world in this process: what it holds, and what it sends in a step.

fake process group (collectives do nothing) ── one rank of the world
fake tensors (shapes without memory)        ── its part of the model, and one step of it
"""
