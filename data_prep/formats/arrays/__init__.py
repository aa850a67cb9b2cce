"""Arrays in files: NumPy, raw numbers, HDF5, NetCDF and Zarr."""
