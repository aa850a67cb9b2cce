"""The modules that a batch passes through.

    sampler ── which sample stands at a position                 samplers/
       │
    source ─── samples by index: reader, windows, concat,        sources/  from hpctrain.data.shards
       │       images                                            places/   in place, or staged
    loader ─── threads, buffers, this rank's share               loading/
       │                                                         workers/  Python, in processes
       │
    feed ───── on the device, transformed

Import the modules themselves (`from hpctrain.data.loading.loader import Loader`): this package
imports nothing.
"""
