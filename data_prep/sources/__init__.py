"""Commands that write a data set: one module for each kind of source."""
