"""Worker processes that apply Python transforms to single samples and return whole batches."""
