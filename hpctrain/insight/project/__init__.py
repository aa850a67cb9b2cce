"""Write a project of one's own: a package, its configs, its data, a test, a batch script."""
