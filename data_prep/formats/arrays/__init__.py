"""Arrays in files: NumPy, raw numbers, HDF5 and NetCDF."""
