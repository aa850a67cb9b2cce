"""From a source to a data set: pieces are converted one by one, then put together."""
