"""Files of others: how each format is found, cut and read.

arrays/   NumPy, HDF5                                 images/     image files, lists of them
hdf5/     what HDF5 files of other programs hold      text/       documents and tokens
tables/   CSV, Parquet                                user_code   whatever Python code gives

All of them use `files` and `opening`, which find, cut and open files. `samples` collects samples
that come one by one, and has the rules that hold for values of every format: what a field can
store, and what a cast would change.
"""
