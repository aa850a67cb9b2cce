"""What a model and its samples are, without memory: parameters, FLOPs, layers, activations."""
