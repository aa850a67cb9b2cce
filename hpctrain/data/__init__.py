"""The modules that a batch passes through.

    sampler ── which sample stands at a position                 samplers/
       │
    source ─── samples by index: reader, windows, concat,        storage/  mapped or decoded bytes
       │       images                                            places/   in place, or staged
    loader ─── threads, buffers, this rank's share               workers/  Python, in processes
       │
    feed ───── on the device, transformed

Import the modules themselves (`from hpctrain.data.loading.loader import Loader`): this package imports
nothing, so that the login node reads an index without torch and `data_prep` writes shards
without it.
"""
