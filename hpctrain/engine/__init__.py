"""The training itself, from the start of a rank to its end."""
