"""Commands that look at a data set, or adopt one."""
