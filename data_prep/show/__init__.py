"""Show data sets as tables and plots."""
