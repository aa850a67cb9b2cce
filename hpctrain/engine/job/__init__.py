"""One process's try at a run: build the objects, train, record how it ended."""
