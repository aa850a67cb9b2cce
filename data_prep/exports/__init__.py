"""What a data set can be exported to: a class with `fields` and `write`, for each kind of file."""
