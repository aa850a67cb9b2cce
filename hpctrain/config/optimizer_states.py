"""How many tensors of the size of the parameters an optimizer keeps."""

from hpctrain.config.schema import OptimizerConfig


def optimizer_states(optimizer: OptimizerConfig) -> int:
    """Return their number: that of torch's optimizers, and 2 for one that is not known."""
    name, options = optimizer._target_.rpartition(".")[2], optimizer.options
    if name == "SGD":
        return int(bool(options.get("momentum")))
    if name == "RMSprop":
        return 1 + bool(options.get("momentum")) + bool(options.get("centered"))
    return (1 if name in ("ASGD", "Adagrad") else 2) + bool(options.get("amsgrad"))
