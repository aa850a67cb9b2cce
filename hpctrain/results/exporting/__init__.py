"""What `export` writes: weights, programs and tables, in the layouts of other libraries."""
