"""Export of data sets: for each format a class with `fields` and `write`."""
