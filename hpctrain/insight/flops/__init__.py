"""How much a model computes for a sample, and how much of a device a training so uses."""
