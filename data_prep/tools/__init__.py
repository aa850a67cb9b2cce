"""Commands that look at a data set, or finish one."""
