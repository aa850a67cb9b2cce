"""Read data sets in our format, for the commands that look at one or write it again."""
