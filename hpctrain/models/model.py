"""The base class of our models: they can be built on the meta device and initialised later."""

from torch import nn


class Model(nn.Module):
    """A model whose modules can be initialised one by one, in place.

    A model that is too large for one rank is built on the meta device, sharded, and materialised
    with `to_empty`. Its values come from a second one on the meta device: `init_module` is called
    for each module of it, which then has memory on the CPU of one rank. This needs two things:
    every module that holds parameters or buffers has a `reset_parameters`, and none of them reads
    another module.
    """

    def init_module(self, module: nn.Module) -> None:
        """Initialise in place what `module` holds itself, without its submodules.

        Random numbers come only from torch's global generator.

        Args:
            module: A module of this model. Its parameters and buffers are real tensors, whose
                values may be anything; on the meta device this does nothing.

        Raises:
            TypeError: The module has parameters or buffers, but no `reset_parameters`.
        """
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        elif any(True for _ in module.parameters(recurse=False)) or module._buffers:
            raise TypeError(f"{type(module).__name__} has no reset_parameters")
