"""Loading: which rows each step of a rank reads, and the threads that read them ahead."""
