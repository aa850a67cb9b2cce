"""Files of others: how each format is found, cut and read.

arrays/   NumPy, raw numbers, HDF5, NetCDF, Zarr      images/   image files, lists of them
hdf5/     what HDF5 files of other programs hold      text/     documents and tokens
tables/   CSV, Parquet, Arrow                         shards/   MDS

Here are what all of them use: `files` and `opening` find, cut and open files, `samples` collects
samples that come one by one, and `casts` tells what a cast would change.
"""
