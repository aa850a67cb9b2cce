"""What `export` writes: weights, in the layouts of other libraries."""
