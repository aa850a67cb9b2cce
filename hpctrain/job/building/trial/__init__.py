"""A trial of the optimizer before the first step of a training."""
