"""Shards: the file format of a data set, its index, and how both are written.

`hpctrain.data` reads what is described here, and `data_prep` writes it. Neither torch nor h5py is
imported before it is needed, so that a login node reads an index in milliseconds.
"""
