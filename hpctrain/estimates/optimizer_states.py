"""How many tensors of the size of the parameters an optimizer keeps."""

from hpctrain.config.schema import OptimizerConfig

# The optimizers of torch with a fixed number of state tensors of the size of the parameters.
_STATES = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Rprop": 2,
    "ASGD": 1,
    "Adagrad": 1,
}


def optimizer_states(optimizer: OptimizerConfig) -> int:
    """Return how many tensors of the size of the parameters an optimizer keeps."""
    name, options = optimizer._target_.rpartition(".")[2], optimizer.options
    if name == "SGD":
        return int(bool(options.get("momentum")))
    if name == "RMSprop":
        return 1 + bool(options.get("momentum")) + bool(options.get("centered"))
    return _STATES.get(name, 2) + bool(options.get("amsgrad"))
