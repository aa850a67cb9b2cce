"""The version of hpctrain and data_prep."""

__version__ = "0.3.0"
