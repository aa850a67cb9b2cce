"""Arrays in files: NumPy and HDF5."""
