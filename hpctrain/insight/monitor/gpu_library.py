"""What the library of a maker tells of its GPUs, in our units: the adapter for NVIDIA and AMD.

monitor.gpus              rows (sensor, reading, metrics)   ──┐
doctor.checks.gpu_health  rows (check, reading, judgement)  ──┴── Library ── Nvidia, by NVML
                                                                         └── Amd, by amdsmi
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

# What the import of a maker's module may raise: the library of ROCm may be missing, or another.
NOT_LOADED = ImportError, OSError, KeyError, AttributeError


class NotTold(LookupError):
    """The GPU has no such value now, and its library says so in a way of its own."""


class Library:
    """The library of a maker.

    Args:
        module: The module of Python; None imports the one that is installed.

    Raises:
        ImportError: It is not installed; `NOT_LOADED` has other errors of the import.

    Attributes:
        errors: What the methods and the readings may raise.
        readings: The functions by their names; each takes what `find` has returned. `Nvidia` has
            all of them: bytes, percent, watts, joules, MHz, degrees Celsius. A maker whose GPUs
            have no such thing lacks the reading.
    """

    NAME: ClassVar[str]
    MODULE: ClassVar[str]
    INSTALL: ClassVar[str] = ""  # how to get the module
    TOOL: ClassVar[str]  # the program that tells people more
    NCCL_NEEDS_IT: ClassVar[bool] = False  # ranks with GPUs cannot meet where it does not answer
    NUMBER: ClassVar[str]  # the attribute of its errors that has their number
    NEVER: ClassVar[tuple[int, ...]]  # the numbers of what nobody is told here
    LOST: ClassVar[tuple[int, ...]] = ()  # those of a GPU that has fallen off the bus

    errors: tuple[type[Exception], ...]
    readings: Mapping[str, Callable[[Any], Any]]

    def __init__(self, module: Any = None) -> None:
        self.module = import_module(self.MODULE) if module is None else module

    def open(self) -> None:
        """Connect to the driver."""
        raise NotImplementedError

    def find(self, identity: str) -> Any:
        """Return the GPU of an identity, as `distributed.devices.visible` writes it."""
        raise NotImplementedError

    def lacks(self, error: Exception) -> bool:
        """Return whether an error says that nobody is told here what was asked for."""
        of_other_version = isinstance(error, AttributeError)
        return of_other_version or getattr(error, self.NUMBER, None) in self.NEVER

    def is_lost(self, error: Exception) -> bool:
        """Return whether an error says that the GPU has fallen off the bus, or needs a reset."""
        return getattr(error, self.NUMBER, None) in self.LOST

    def is_part(self, gpu: Any) -> bool:
        """Return whether it is a part of a GPU."""
        return "part" in self.readings and self.readings["part"](gpu)

    def read(self, reading: str, gpu: Any) -> tuple[Any, ...]:
        """Return the values of a reading."""
        found = self.readings[reading](gpu)
        return found if isinstance(found, tuple) else (found,)
