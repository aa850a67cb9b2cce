"""Arrays in files: NumPy, HDF5 and NetCDF."""
