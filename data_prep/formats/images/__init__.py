"""Image files, and the folders and lists that name them."""
