"""What HDF5 files of other programs hold, and whether it was written."""
