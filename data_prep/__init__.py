"""data_prep: any data into HDF5 shards that hpctrain trains on, and everybody else reads.

    sources/   commands that write      ── formats/: how the files of others are read
    tools/     commands that look       ── datasets/: how ours are read; show/, exports/
    convert    source ── pieces ── processes ── shards ── finalize ── OUT/*.h5, OUT/index.json

`python -m data_prep --help` has the commands; `cli` names them, each is a module that nobody
else imports. Of hpctrain it needs the format and what reads it, never torch.
"""
