"""Files of others: how each format is found, cut and read."""
