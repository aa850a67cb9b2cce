"""Python transforms of single samples, in processes that return whole batches."""
