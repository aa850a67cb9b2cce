"""The road of a batch: shards + index → order (pure) → reader → loader.

Import the modules themselves (`from hpctrain.data.loader import Loader`): this package imports
nothing, so that the login node reads an index without torch and `data_prep` writes shards
without it.
"""
