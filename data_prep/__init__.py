"""data_prep: any data into HDF5 shards that hpctrain trains on, and everybody else reads.

    source (fields, batches) ── convert ── ShardWriter ── OUT/*.h5, OUT/index.json

`python -m data_prep --help` has the commands. Of hpctrain it needs the shard format and the
index, never torch.
"""
