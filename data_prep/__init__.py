"""data_prep: convert data into HDF5 shards for hpctrain; any other HDF5 program reads them too.

    sources/   commands that write data sets ── formats/: readers of foreign file formats
    tools/     commands that read data sets  ── dataset: reads ours, as a training does
    convert    source ── pieces ── processes ── shards ── finalize ── OUT/*.h5, OUT/index.json

`python -m data_prep --help` lists the commands. `cli` has the module of each command; no other
module imports it. data_prep imports the data set format and its reader from hpctrain, never torch.
"""
